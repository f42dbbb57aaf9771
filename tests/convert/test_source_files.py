"""Which files of a folder are the model: those that transformers loads, in its order, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.convert.open_source import open_source
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError
from mxquant.inspection.summary import open_checkpoint
from mxquant.inspection.verify import verify_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ORDER = (SINGLE, INDEX, BIN, BIN_INDEX)
NORM = "model.norm.weight"


@pytest.fixture
def tensors(make_checkpoint):
    return load_file(make_checkpoint("llama") / SINGLE)


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A model folder without weights."""
    found = tmp_path / "source"
    found.mkdir()
    shutil.copy(make_checkpoint("llama") / "config.json", found)
    return found


def _write(folder: Path, kind: str, tensors: dict[str, torch.Tensor], value: float) -> None:
    """One set of weights, which is told by the values of its last norm."""
    tensors = {**tensors, NORM: torch.full_like(tensors[NORM], value)}
    shards = (
        [kind] if "index" not in kind else [kind.replace(".safetensors.index.json", "-0000{}-of-00002.safetensors")]
    )
    if kind == BIN_INDEX:
        shards = ["pytorch_model-0000{}-of-00002.bin"]
    names = list(tensors)
    if len(shards) == 1 and "{}" in shards[0]:
        shards = [shards[0].format(i) for i in (1, 2)]
        weight_map = {name: shards[i % 2] for i, name in enumerate(names)}
        (folder / kind).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for i, shard in enumerate(shards):
        part = {name: tensors[name] for name in names[i :: len(shards)]}
        if shard.endswith(".bin"):
            torch.save(part, folder / shard)
        else:
            save_file(part, folder / shard, metadata={"format": "pt"})


def _loaded(folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    return float(AutoModelForCausalLM.from_pretrained(folder).model.norm.weight[0].detach())


def _read(folder: Path) -> float:
    return float(open_source(folder).read(NORM)[0])


@pytest.mark.parametrize("count", range(1, 5))
def test_the_order_is_that_of_transformers(count, folder, tensors, tmp_path):
    there = ORDER[-count:]
    for kind in there:
        _write(folder, kind, tensors, 2.0 + ORDER.index(kind))
    assert _read(folder) == _loaded(folder) == 2.0 + ORDER.index(there[0])
    warnings = plan_model(folder, "ue5m3/16")[1].warnings if count > 1 else []
    assert not there[1:] or any(
        w.startswith(f"{there[0]} is read") and all(x in w for x in there[1:]) for w in warnings
    )


@pytest.mark.parametrize("gone", [True, False])
def test_every_command_reads_the_single_file_beside_an_old_index(gone, folder, tensors, tmp_path):
    _write(folder, INDEX, {name: t + 1 for name, t in tensors.items()}, 7.0)
    _write(folder, SINGLE, tensors, 3.0)
    if gone:
        for shard in folder.glob("model-*.safetensors"):
            shard.unlink()
    assert _loaded(folder) == 3.0
    report = mxquant.quantize_model(folder, tmp_path / "q", "ue5m3/16")
    assert any(SINGLE in w and INDEX in w for w in report.plan.warnings)
    found = verify_checkpoint(tmp_path / "q", folder, samples=None)
    assert not found.faults
    # An output that was written over by one of another number of shards looks like this, too.
    q, old = tmp_path / "q", tmp_path / "old"
    mxquant.quantize_model(folder, old, "ue5m3/16", max_shard_bytes=40_000)
    for file in old.glob("*.safetensors*"):
        if not gone or file.name == INDEX:
            shutil.copy(file, q)
    found = verify_checkpoint(q, folder, samples=None)
    assert not found.faults
    assert any(w.startswith(f"{SINGLE} is read") and INDEX in w for w in found.warnings)
    assert {info.file.name for info in open_checkpoint(q).tensors.values()} == {SINGLE}
    told = []
    mxquant.dequantize_model(q, tmp_path / "dense", notify=told.append)
    assert any(text.startswith(f"{SINGLE} is read") for text in told)
    assert load_file(tmp_path / "dense" / SINGLE)[NORM][0] == 3.0


def test_an_index_whose_shards_are_gone_is_an_error_without_the_single_file(folder, tensors):
    _write(folder, INDEX, tensors, 3.0)
    (folder / "model-00002-of-00002.safetensors").unlink()
    _write(folder, BIN, tensors, 4.0)
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*download it again"):
        open_source(folder)


def test_a_file_that_the_config_names_comes_first(folder, tensors, tmp_path):
    _write(folder, SINGLE, tensors, 3.0)
    _write(folder, "other.safetensors", tensors, 4.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    assert _read(folder) == _loaded(folder) == 4.0
    report = mxquant.quantize_model(folder, tmp_path / "q", "ue5m3/16")
    assert any(w.startswith("other.safetensors is read") for w in report.plan.warnings)
    assert _loaded(tmp_path / "q") == 4.0  # whose own file has another name
    assert not verify_checkpoint(tmp_path / "q", folder, samples=None).faults


@pytest.mark.parametrize("name", ["gone.safetensors", "../a.safetensors", "adapter_model.bin", 3])
def test_a_file_that_the_config_names_and_nobody_can_read(name, folder, tensors):
    _write(folder, SINGLE, tensors, 3.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    with pytest.raises(CheckpointError, match="transformers_weights"):
        open_source(folder)
    assert [fault.kind for fault in verify_checkpoint(folder).faults] == ["files"]
