"""The wheel holds the files that the repository has for it, and works outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import mxquant

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
DIST_INFO = f"mxquant-{mxquant.__version__}.dist-info/"
# In our folders, but not part of the package.
NOT_SHIPPED = (".md", ".txt", ".toml", ".cpp", ".h")
# Compiled by the build where there is a compiler, so no file of the repository.
COMPILED = {"mxquant/kernels/cpu/_native.so"}

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="the list of files comes from git"
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command. What points Python or mxquant at other files is not inherited."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MXQUANT_CPU_LIBRARY")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=inherited | environment, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def repository_files() -> list[str]:
    """What git has or would have: tracked files and new ones that it does not ignore."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build left in the checkout would end up in the wheel."""
    folder = tmp_path_factory.mktemp("build")
    for name in repository_files():
        if name.split("/")[0] in {*FOLDERS.values(), "pyproject.toml", "setup.py", "README.md", "LICENSE"}:
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist")
    run(*build, folder / "source", cwd=folder)
    (made,) = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
        cwd=target,
    )
    return target


def expected_files() -> set[str]:
    """The repository's files for the package, under their names once installed."""
    found = set()
    for package, folder in FOLDERS.items():
        for name in repository_files():
            inside = name.removeprefix(f"{folder}/")
            is_data = package == "mxquant" and inside.startswith("bundled/model/")
            if inside != name and (is_data or not inside.endswith(NOT_SHIPPED)):
                found.add(f"{package.replace('.', '/')}/{inside}")
    return found


def test_wheel_holds_the_files_of_the_repository_and_no_others(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.startswith(DIST_INFO)}
    expected = expected_files()
    assert {"mxquant/cli/main.py", "mxquant/evals/__init__.py", "mxquant/bundled/model/config.json"} <= expected
    assert sorted(expected - names) == [], "missing: see packages and package-data in pyproject.toml"
    assert sorted(names - expected - COMPILED) == []


def test_wheel_holds_the_kernels_and_says_which_platform_they_are_for(wheel):
    compiled = set(zipfile.ZipFile(wheel).namelist()) & COMPILED
    if shutil.which("c++") is None:
        assert not compiled
        assert wheel.name.endswith("-py3-none-any.whl")
    else:
        assert compiled == COMPILED
        assert "-py3-none-" in wheel.name
        assert not wheel.name.endswith("-any.whl")


def test_the_package_builds_and_works_without_a_compiler(tmp_path):
    """Everything falls to the reference, and the package says so."""
    for name in repository_files():
        if name.split("/")[0] in {*FOLDERS.values(), "pyproject.toml", "setup.py", "README.md", "LICENSE"}:
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist")
    run(*build, tmp_path / "source", cwd=tmp_path, CXX="/nowhere/c++")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    run(*install, tmp_path / "installed", wheel, cwd=tmp_path)
    program = (
        "import torch, mxquant\n"
        "from mxquant.ops.backends import explain\n"
        "w = torch.ones(4, 32)\n"
        "q = mxquant.quantize(w, mxquant.QuantScheme())\n"
        "print(explain('quantize', w, q.shape, q.scheme, device_type='cpu'), q.dequantize().sum().item())"
    )
    said = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert "'reference'" in said
    assert "_native.so was not built" in said
    assert said.rstrip().endswith("128.0")


def test_wheel_brings_one_import_package_only(wheel, installed):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{DIST_INFO}top_level.txt").decode().split() == ["mxquant"]
    assert {p.name for p in installed.iterdir()} <= {"mxquant", DIST_INFO.rstrip("/"), "bin", "Scripts"}
    assert not [name for name in ("kernels", "cli", "evals") if (installed / name).exists()]


def test_wheel_has_licence_and_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert b"Apache License" in archive.read(f"{DIST_INFO}licenses/LICENSE")
        entries = ConfigParser()
        entries.read_string(archive.read(f"{DIST_INFO}entry_points.txt").decode())
    assert entries["console_scripts"]["mxquant"] == "mxquant.cli.main:main"
    assert entries["torch.backends"]["mxquant"] == "mxquant._autoload:install"


def test_installed_package_works_outside_the_checkout(installed, tmp_path):
    program = (
        "import sys, mxquant.cli.main, mxquant.evals, mxquant.bundled\n"
        "assert (mxquant.bundled.path() / 'model.safetensors').is_file()\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'mxquant'), sep='\\n')"
    )
    files = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert files
    assert not [name for name in files if not Path(name).is_relative_to(installed)]


def test_mapped_folders_are_no_packages_of_their_own_outside_the_checkout(installed, tmp_path):
    program = (
        "import importlib.util as u\nprint(*(s.origin for n in ('cli', 'evals') if (s := u.find_spec(n))), sep='\\n')"
    )
    found = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert not [name for name in found if Path(name).is_relative_to(installed) or Path(name).is_relative_to(ROOT)]
