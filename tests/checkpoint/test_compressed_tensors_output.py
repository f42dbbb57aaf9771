"""NVFP4 and MXFP4 checkpoints are compressed-tensors': its bytes, its loader, its values."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

import mxquant

# The schemes whose scale rules are those of compressed-tensors.
STANDARD = {"nvfp4": "nvfp4/absmax", "mxfp4": "mxfp4/even"}
COMPRESSORS = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}


@pytest.fixture(params=["nvfp4", "mxfp4"])
def preset(request):
    return request.param


@pytest.fixture
def source(make_checkpoint, tmp_path):
    """A bf16 model with blocks of zeros, blocks too small for a scale, and an outlier."""
    folder = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama-even", "bfloat16"), folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    weight[3, :32], weight[4, :32], weight[5, 7] = 0, weight[4, :32] * 1e-8, 3.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bytes_are_those_of_compressed_tensors_on_fp32_weights(preset, source, tmp_path):
    out = tmp_path / "out"
    mxquant.quantize_model(source, out, STANDARD[preset])
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    modules = [n.removesuffix(".weight_packed") for n in after if n.endswith(".weight_packed")]
    assert len(modules) == 14
    for module in modules:
        weight = before[f"{module}.weight"].float()
        blocks = weight.unflatten(1, (-1, scheme.weights.group_size))
        global_scale = after.get(f"{module}.weight_global_scale")
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
        state = {"weight": weight, "weight_scale": scale}
        if global_scale is not None:
            state["weight_global_scale"] = global_scale
        oracle = COMPRESSORS[preset].compress(state, scheme)
        for part in ("weight_packed", "weight_scale"):
            ours, theirs = after[f"{module}.{part}"], oracle[part]
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (module, part)


def test_plain_transformers_loads_it_and_computes_what_the_decoded_weights_compute(preset, source, tmp_path):
    from transformers import AutoModelForCausalLM

    mxquant.quantize_model(source, tmp_path / "q", preset)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d", dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        # compressed-tensors decodes to bf16, which only a bf16 model can multiply with.
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)(tokens).logits
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.float32)(tokens).logits
        source_logits = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
    # Within bf16's rounding of each other, and far from the model before quantization.
    assert float((theirs - ours).norm() / ours.norm()) < 0.015
    assert float((source_logits - ours).norm() / ours.norm()) > 0.05


def test_every_dense_linear_layer_is_in_the_ignore_list(preset, source, tmp_path):
    recipe = mxquant.QuantRecipe(default=mxquant.QuantScheme.preset(preset), exclude=(r"layers\.1\.",))
    mxquant.quantize_model(source, tmp_path / "out", recipe)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    after = load_file(tmp_path / "out/model.safetensors")
    dense = {n.removesuffix(".weight") for n, t in after.items() if n.endswith("_proj.weight") and t.ndim == 2}
    assert len(dense) == 7
    assert set(config["ignore"]) == dense | {"lm_head"}
