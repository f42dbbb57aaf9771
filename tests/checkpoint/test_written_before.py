"""Checkpoints that version 0.1.0 wrote load and decode to the same bits.

``tests/data/made_by_0_1_0`` holds one tiny random model for each kind of output, and ``decoded.json``: of each tensor
that 0.1.0's ``dequantize`` made of them, dtype, shape and the first 16 digits of the SHA-256 of its bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mxquant
from mxquant.inspection.verify import verify_checkpoint

FOLDER = Path(__file__).resolve().parents[1] / "data" / "made_by_0_1_0"
DECODED = json.loads((FOLDER / "decoded.json").read_text(encoding="utf-8"))


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def test_there_is_one_of_each_kind():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(DECODED)
    configs = [json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8")) for name in DECODED]
    methods = {config["quantization_config"]["quant_method"] for config in configs}
    assert methods == {"mxquant", "compressed-tensors"}


@pytest.mark.parametrize("name", DECODED)
def test_it_decodes_to_the_same_bits(name, tmp_path):
    mxquant.dequantize_model(FOLDER / name, tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    found = {key: digest(tensor) for key, tensor in tensors.items()}
    assert found == DECODED[name]


@pytest.mark.parametrize("name", DECODED)
def test_it_loads_packed_and_its_weights_are_those_bits(name):
    model = mxquant.load(FOLDER / name)
    packed = [m for m in model.modules() if isinstance(m, mxquant.QuantLinear) or hasattr(m, "entries")]
    assert packed
    layers = {n: m for n, m in model.named_modules() if isinstance(m, mxquant.QuantLinear)}
    for path, layer in layers.items():
        weight = layer.dequantize(torch.bfloat16)
        weight = weight.t() if name.startswith("gpt2") and path != "lm_head" else weight  # its files hold [in, out]
        key = f"{path}.weight" if f"{path}.weight" in DECODED[name] else f"{path.removeprefix('transformer.')}.weight"
        assert digest(weight) == DECODED[name][key], path
    assert model(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", DECODED)
def test_verify_finds_nothing_wrong(name):
    assert not verify_checkpoint(FOLDER / name).faults
