"""The output's name where no ``--out`` is given: usable wherever the command is run, whatever the source is called."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from mxquant.cli.main import main

LABEL = "fp4-ue5m3-b16"
HASH = 40 * "a"
# source, working folder below the temporary one, output
CASES = {
    ".": (".", "model", "../model"),
    "./": ("./", "model", "../model"),
    "..": ("..", "model/sub", "../../model"),
    "../": ("../", "model/sub", "../../model"),
    "./..": ("./..", "model/sub", "../../model"),
    "a folder here": ("model", "", "model"),
    "with a slash": ("model/", "", "model"),
    "with a dot": ("./model/.", "", "model"),
    "a sibling": ("../model", "work", "model"),
    "the parent of another": ("../model/sub/..", "work", "model"),
    "a link": ("link", "", "link"),
    "inside a link": (".", "link", "../model"),
    "a snapshot": (f"hub/models--me--tiny-llama/snapshots/{HASH}", "", "tiny-llama"),
    "a snapshot with a slash": (f"hub/models--me--tiny-llama/snapshots/{HASH}/", "", "tiny-llama"),
    "a link to a snapshot": ("current", "", "current"),
}


@pytest.fixture
def root(make_checkpoint, tmp_path):
    for name in ("model", f"hub/models--me--tiny-llama/snapshots/{HASH}"):
        shutil.copytree(make_checkpoint("llama-tied", "bfloat16"), tmp_path / name)
    (tmp_path / "model/sub").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "current").symlink_to(f"hub/models--me--tiny-llama/snapshots/{HASH}")
    return tmp_path


def _run(*args):
    return CliRunner().invoke(main, ["quantize", *map(str, args)])


@pytest.mark.parametrize("name", CASES)
def test_the_default_name(name, root, monkeypatch):
    source, here, out = CASES[name]
    monkeypatch.chdir(root / here)
    result = _run(source, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["out"] == f"{out}-{LABEL}"


def test_the_folder_that_one_is_in_is_quantized_beside_it(root, monkeypatch):
    monkeypatch.chdir(root / "model")
    assert _run(".").exit_code == 0
    assert (root / f"model-{LABEL}/model.safetensors").exists()
    assert not [p for p in (root / "model").iterdir() if LABEL in p.name]


@pytest.mark.parametrize("here", [f"hub/models--me--tiny-llama/snapshots/{HASH}"])
def test_the_hubs_cache_takes_no_outputs(here, root, monkeypatch):
    monkeypatch.chdir(root / here)
    result = _run(".")
    assert result.exit_code == 1
    assert "--out" in result.stderr


def test_the_root_has_no_name(root, monkeypatch):
    monkeypatch.chdir(root)
    result = _run("/")
    assert result.exit_code == 1
    assert "--out" in result.stderr
