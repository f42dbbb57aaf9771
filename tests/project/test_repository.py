"""Files around the code: workflows, hooks, templates and the citation say what is true of the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import mxquant

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: dict) -> str:
    return "\n".join(step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists(path):
    workflow = read(path)
    assert workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
    said = commands(workflow)
    assert set(re.findall(r"\bmake ([a-z-]+)", said)) <= TARGETS
    assert [script for script in re.findall(r"^\.ci/\w+", said, re.MULTILINE) if not (ROOT / script).is_file()] == []


def test_every_kind_of_test_runs_somewhere():
    said = commands(read(ROOT / ".github" / "workflows" / "ci.yml"))
    assert {".ci/run", "make test-reference", "make test-compat", "make sanitize"} <= set(said.splitlines())


def test_a_release_is_published_from_its_own_environment_only():
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    allowed = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert allowed == {name for name, job in jobs.items() if job.get("environment") == "release"} == {"publish"}


def test_hooks_before_a_commit_run_what_make_lint_runs():
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [hook["entry"] for hook in hooks if "entry" in hook]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert lint is not None
    for line, start in zip(
        lint[1].splitlines(), ("ruff check", "ruff format", "make types"), strict=True
    ):  # the same tools in the same order
        tool = line.strip().replace("$(VENV)/bin/", "").replace("$(MAKE) --no-print-directory", "make")
        assert tool.startswith(start)
        assert any(entry.removeprefix(".venv/bin/").startswith(start) for entry in entries)


def test_the_version_stands_once():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in pyproject
    assert mxquant.__version__ not in pyproject


def test_the_citation_is_of_this_version_and_names_the_papers():
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == mxquant.__version__
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    papers = [reference["url"] for reference in citation["references"]]
    assert len(papers) == 2
    assert all(url in readme for url in papers)


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_for_issues_are_whole(name):
    form = read(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    assert all({"type", "id", "attributes"} <= set(field) for field in form["body"])
