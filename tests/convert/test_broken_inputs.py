"""Broken checkpoints: one clear line that names the file or tensor, no traceback, nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from broken_inputs import ODD_NAMES, SECOND, SOURCES, UP, Fault, repack, run, stderr_line, tree
from broken_pickles import OTHERS
from click.testing import Result

from mxquant.inspection.faults import KINDS

CORPUS = SOURCES + OTHERS


@pytest.fixture
def source(good_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(good_checkpoint, tmp_path / "source"))


def by_name(faults: list[Fault]):
    return pytest.mark.parametrize("fault", faults, ids=str)


def refuses(result: Result, fault: Fault) -> None:
    line = stderr_line(result)
    assert result.exit_code == 1
    assert not [words for words in fault.says if words not in line], line


def test_the_good_checkpoint_is_good(source, tmp_path):
    assert run("quantize", source, "-o", tmp_path / "out").exit_code == 0
    assert run("verify", tmp_path / "out", "--source", source).exit_code == 0


def test_the_corpus_is_large():
    names = [fault.name for fault in CORPUS]
    assert len(names) == len(set(names)) >= 100


@by_name(CORPUS)
def test_quantize_names_what_is_broken_and_leaves_nothing_behind(fault, source, tmp_path):
    fault.breaks(source)
    before = tree(tmp_path)
    refuses(run("quantize", source, "-o", tmp_path / "new" / "folder" / "out"), fault)
    assert tree(tmp_path) == before


@by_name(CORPUS)
def test_no_command_shows_a_traceback(fault, source, tmp_path):
    """Commands that only look may well succeed: a checkpoint with the wrong hidden size can be listed."""
    fault.breaks(source)
    before = tree(tmp_path)
    if run("inspect", source).exit_code:
        stderr_line(run("inspect", source))
    verified = run("verify", source)
    assert verified.exit_code in {0, 1, *(kind.code for kind in KINDS.values())}
    assert verified.exit_code == 1 or "Checked" in verified.stdout or "FAULT" in verified.stdout
    assert run("dequantize", source, tmp_path / "out").exit_code == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ODD_NAMES)
def test_tensors_of_odd_names_are_carried_along(name, source, tmp_path):
    from safetensors.torch import load_file

    numbers = b"\x00\x3f\x80\x3f"
    repack(source, lambda tensors: tensors.update({ODD_NAMES[name]: ("BF16", [2], numbers)}))
    result = run("quantize", source, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")[ODD_NAMES[name]].tolist() == [0.5, 1.0]


def test_links_as_in_the_hubs_cache_are_followed(source, tmp_path):
    blobs = tmp_path / "blobs"
    source.rename(blobs)
    source.mkdir()
    for file in blobs.iterdir():
        (source / file.name).symlink_to(f"../blobs/{file.name}")
    (source / "circle").symlink_to(".")
    assert run("quantize", source, "-o", tmp_path / "out").exit_code == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "LICENSE").read_text() == (blobs / "LICENSE").read_text()


@pytest.mark.parametrize("name", ["config.json", "LICENSE"])
def test_what_may_not_be_read_is_named(name, source, tmp_path, monkeypatch):
    """Tests may run as root, whom no mode of a file stops."""
    real = open

    def guarded(file, *args, **kwargs):
        if not isinstance(file, int) and Path(file) == source / name:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **kwargs)

    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", guarded)
        patch.setattr("io.open", guarded)
        result = run("quantize", source, "-o", tmp_path / "out")
    refuses(result, Fault(name, id, (name, "Permission denied")))
    assert tree(tmp_path) == before


def test_a_nan_that_only_a_part_of_the_work_meets_undoes_all_of_it(source, tmp_path):
    """The shard before it is finished by then."""
    bits = b"\xc0\x7f"
    repack(source, lambda t: t.update({UP: (*t[UP][:2], bits + t[UP][2][2:])}))
    before = tree(tmp_path)
    result = run("quantize", source, "-o", tmp_path / "out", "--max-shard-size", "20KB")
    assert UP in stderr_line(result)
    assert tree(tmp_path) == before


def test_json_asked_for_is_not_half_printed(source, tmp_path):
    (source / SECOND).unlink()
    for command in (["quantize", source, "-o", tmp_path / "out", "--json"], ["inspect", source, "--json"]):
        result = run(*command)
        assert SECOND in stderr_line(result)
        assert not result.stdout
    found = json.loads(run("verify", source, "--json").stdout)
    assert [fault["kind"] for fault in found["faults"]] == ["files"] * len(found["faults"])
    assert found["exit_code"] == KINDS["files"].code
