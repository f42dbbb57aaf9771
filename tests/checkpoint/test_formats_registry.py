"""The registry of packed formats: all there is to know of one stands in one file.

A toy format that exists in this test only is recognised, inspected, verified, loaded, dequantized and refused as a
source like the others. Names of tensors of real formats occur nowhere but in their files.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from ml_dtypes import float8_e4m3fn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.base import Layout, PackedFormat
from mxquant.checkpoint.formats.modelopt import divisor_of
from mxquant.checkpoint.formats.packed import PACKED, SCALE
from mxquant.checkpoint.reader import Checkpoint
from mxquant.cli.main import main
from mxquant.errors import CheckpointError
from mxquant.inspection.summary import inspect_checkpoint
from mxquant.inspection.verify import verify_checkpoint
from mxquant.schemes.formats import QuantScheme

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("weight_packed", "weight_scale_2", "_blocks", "weight_global_scale")
SCHEME = QuantScheme(scale="ue5m3", block=16)


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


class Toy(PackedFormat):
    """Two fp4 codes a byte, the even index in the *high* nibble, and exponents stored with all bits inverted."""

    method = "toy"
    suffixes = {PACKED: "_nibbles", SCALE: "_steps"}  # noqa: RUF012
    converts = (PACKED, SCALE)

    def read(self, config, tensors, prefix=""):
        layout = Layout(self)
        for info in tensors.values():
            name = info.name.removesuffix("_nibbles")
            if name != info.name and name.removesuffix(".weight") in config["layers"]:
                rows, row_bytes = info.shape
                layout.weights.append(self.weight(name, SCHEME, (rows, 2 * row_bytes)))
        return layout

    def convert(self, role, tensor):
        return swapped(tensor) if role == PACKED else ~tensor

    def why_not_packed(self, config):
        return None


def swapped(codes):
    return (codes >> 4) | (codes << 4)


@pytest.fixture
def toy():
    registry.register(Toy())
    yield
    registry.unregister(registry.get("toy"))


@pytest.fixture
def toy_model(make_checkpoint, tmp_path):
    """A model in the toy format, written by hand, and the same in ours."""
    ours, folder = tmp_path / "ours", tmp_path / "toy"
    mxquant.quantize_model(make_checkpoint("llama", "bfloat16"), ours, SCHEME)
    tensors, layers = load_file(ours / "model.safetensors"), []
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        layers.append(weight.removesuffix(".weight"))
        tensors[f"{weight}_nibbles"] = swapped(tensors.pop(weight))
        tensors[f"{weight}_steps"] = ~tensors.pop(name)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((ours / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy", "layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, ours


def test_without_registration_the_toy_is_unknown(toy_model):
    with pytest.raises(registry.UnknownFormatError, match="toy"):
        registry.find(Checkpoint(toy_model[0]))


def test_the_toy_is_recognised_and_inspected(toy, toy_model):
    theirs, ours = (inspect_checkpoint(Checkpoint(folder)) for folder in toy_model)
    assert theirs.method == "toy"
    assert len(theirs.weights) == len(ours.weights) == 14
    assert theirs.bits_per_weight == ours.bits_per_weight
    assert {n for n in theirs.roles if theirs.roles[n] == "packed"} == {
        w.weight.name + "_nibbles" for w in theirs.weights
    }
    assert [s.to_dict() for s in theirs.scale_stats().values()] == [s.to_dict() for s in ours.scale_stats().values()]
    assert [s.to_dict() for s in theirs.element_stats().values()] == [
        s.to_dict() for s in ours.element_stats().values()
    ]
    assert "toy" in run("inspect", toy_model[0]).stdout


def test_the_toy_is_verified(toy, toy_model):
    folder = toy_model[0]
    assert not verify_checkpoint(folder).faults
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("_steps"))
    broken = {**tensors, name: torch.zeros_like(tensors[name])}  # inverted: 255, which is NaN
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    (fault,) = verify_checkpoint(folder).faults
    assert fault.kind == "scales"
    assert name.removesuffix("_steps") in fault.message
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors", metadata={"format": "pt"})
    (fault,) = verify_checkpoint(folder).faults
    assert fault.kind == "config"
    assert name in fault.message


def test_the_toy_is_dequantized(toy, toy_model, tmp_path):
    for folder, name in zip(toy_model, ("a", "b"), strict=True):
        mxquant.dequantize_model(folder, tmp_path / name)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_the_toy_is_loaded_packed_and_saved_as_ours(toy, toy_model, tmp_path):
    theirs, ours = (mxquant.load(folder) for folder in toy_model)
    layers = {n: m for n, m in theirs.named_modules() if isinstance(m, mxquant.QuantLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        other = ours.get_submodule(name)
        assert torch.equal(layer.packed, other.packed)
        assert torch.equal(layer.weight_scale, other.weight_scale)
    ids = torch.arange(10)[None]
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    theirs.save_pretrained(tmp_path / "saved")
    again = mxquant.load(tmp_path / "saved")
    assert torch.equal(again(ids).logits, ours(ids).logits)


def test_the_toy_is_refused_as_a_source_with_the_way_out(toy, toy_model, tmp_path):
    result = run("quantize", toy_model[0], "--out", tmp_path / "q")
    assert result.exit_code == 1
    assert "already quantized (toy)" in result.stderr
    assert "mxquant dequantize" in result.stderr


def test_a_method_is_registered_once(toy):
    with pytest.raises(ValueError, match="toy"):
        registry.register(Toy())


# Every format


def test_names_of_packed_tensors_occur_in_the_formats_only():
    allowed = ROOT / "mxquant" / "checkpoint" / "formats"
    strays = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for folder in ("mxquant", "cli", "evals", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if allowed not in path.parents
        for node in strings(ast.parse(path.read_text(encoding="utf-8")))
        if any(name in node.value for name in NAMES)
    ]
    assert not strays


def strings(tree):
    """String constants, docstrings excluded."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node


@pytest.mark.parametrize("format", registry.formats(), ids=lambda f: f.method)
def test_every_format_says_what_its_parts_are(format):
    scheme = QuantScheme.preset("nvfp4" if "global_scale" in format.suffixes else "mxfp4")
    weight = format.weight("a.b.weight", scheme, (64, 128))
    names = [part.name for part in weight.parts.values()]
    assert len(set(names)) == len(names) == (3 if scheme.global_scale else 2)
    assert all(name.startswith("a.b.weight") for name in names)
    assert weight.dense_shape == (64, 128)


# What a stored factor becomes


@pytest.mark.parametrize("factor", [2.0**-9, 0.0123, 1 / 2688, 1234.567, 3e-5, 2.0**-130])
def test_a_stored_factor_gives_the_products_of_numpy_bit_for_bit(factor, tmp_path):
    codes = torch.arange(127, dtype=torch.uint8)
    scales = codes.numpy().view(float8_e4m3fn).astype(np.float32)
    one = np.float32(factor)
    divisor = divisor_of(float(one))
    if divisor is not None:
        assert np.array_equal(scales / np.float32(divisor), scales * one)
    tensors = {"a.weight": torch.full((127, 8), 0x22, dtype=torch.uint8)}  # every element is 1
    tensors |= {"a.weight_scale": codes[:, None].view(torch.float8_e4m3fn), "a.weight_scale_2": torch.tensor(one)}
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "quantization_config": said}))
    mxquant.dequantize_model(folder, tmp_path / "d")
    found = load_file(tmp_path / "d" / "model.safetensors")["a.weight"].numpy()
    assert np.array_equal(found, np.repeat((scales * one)[:, None], 16, 1))


def test_a_power_of_two_is_inverted_exactly_and_most_others_are_not():
    assert divisor_of(2.0**-9) == 2.0**9
    assert divisor_of(math.nan) is None
    assert divisor_of(0.0) is None
    assert any(divisor_of(float(np.float32(f))) is None for f in np.linspace(0.001, 0.002, 50))


# What cannot be decoded is refused


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": config}))
    return folder


def test_formats_of_others_are_made_dense_without_what_only_they_need(tmp_path):
    packed, scale = torch.full((4, 16), 0x22, dtype=torch.uint8), torch.full((4, 1), 127, dtype=torch.uint8)
    weight = {"dtype": "fp4", "scale_format": "e8m0", "group_size": 32}
    quark = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    folder = write(
        tmp_path / "quark", {"a.weight": packed, "a.weight_scale": scale, "a.input_scale": scale.clone()}, quark
    )
    mxquant.dequantize_model(folder, tmp_path / "d")
    found = load_file(tmp_path / "d" / "model.safetensors")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], torch.ones(4, 32, dtype=torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "d" / "config.json").read_text())


def test_the_side_file_of_a_quantization_is_not_carried_to_the_dense_model(tmp_path):
    packed, scale = torch.full((4, 8), 0x22, dtype=torch.uint8), torch.ones(4, 1).to(torch.float8_e4m3fn)
    tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": torch.tensor(0.5)}
    folder = write(tmp_path / "m", tensors, None)
    said = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    mxquant.dequantize_model(folder, tmp_path / "d")
    assert not (tmp_path / "d" / "hf_quant_config.json").exists()
    assert load_file(tmp_path / "d" / "model.safetensors")["a.weight"].eq(0.5).all()


GROUP = {"targets": ["Linear"], "weights": {"group_size": 16}, "format": "nvfp4-pack-quantized"}
REFUSED = {
    "FP8": {"quant_method": "fp8"},
    "GPTQ": {"quant_method": "gptq", "bits": 4},
    "AWQ": {"quant_method": "awq", "bits": 4},
    "compressed-tensors int4": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {**GROUP, "format": "pack-quantized"}},
    },
    "compressed-tensors with rotations": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": GROUP},
        "transform_config": {"config_groups": {"u": {}}},
    },
    "compressed-tensors beside FP8": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": GROUP, "group_1": {**GROUP, "format": "float-quantized"}},
    },
    "ModelOpt FP8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "ModelOpt AWQ": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
    "Quark int8": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_no_message_recommends_a_command_that_refuses(kind, make_checkpoint, tmp_path):
    source = Path(make_checkpoint("llama", "bfloat16"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": REFUSED[kind]}))
    refused = run("quantize", folder, "--out", tmp_path / "q")
    assert refused.exit_code == 1
    assert "already quantized" in refused.stderr
    assert "dequantize" not in refused.stderr
    assert run("dequantize", folder, tmp_path / "d").exit_code == 1
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("text", ["ue5m3/16", "mxfp4", "nvfp4", "mxfp8"])
def test_values_that_are_no_numbers_are_refused_by_name(text, make_checkpoint, tmp_path):
    folder = tmp_path / "q"
    mxquant.quantize_model(make_checkpoint("llama-even", "bfloat16"), folder, text)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(n for n in tensors if n.endswith("up_proj.weight_scale"))[-1]
    part = name.removesuffix("_scale") if text == "mxfp8" else name
    damaged = tensors[part].clone()
    damaged.view(torch.uint8).view(-1)[3] = 0x7F if text in ("nvfp4", "mxfp8") else 0xFF
    save_file({**tensors, part: damaged}, folder / "model.safetensors", metadata={"format": "pt"})
    result = run("dequantize", folder, tmp_path / "d")
    assert result.exit_code == 1
    assert name.removesuffix("_scale") in result.stderr
    assert not (tmp_path / "d").exists()


def test_values_too_large_for_the_dtype_are_refused(tmp_path):
    packed, scale = torch.full((4, 16), 0x77, dtype=torch.uint8), torch.full((4, 1), 150, dtype=torch.uint8)
    weight = {"dtype": "fp4", "scale_format": "e8m0", "group_size": 32}
    quark = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    folder = write(tmp_path / "q", {"a.weight": packed, "a.weight_scale": scale}, quark)
    mxquant.dequantize_model(folder, tmp_path / "bf16")
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        mxquant.dequantize_model(folder, tmp_path / "fp16", dtype=torch.float16)


# compressed-tensors: several groups


def test_each_layer_has_the_format_and_block_of_its_group(tmp_path):
    """Patterns go before classes; ``group_size`` is the block."""
    ones = torch.full((4, 32), 0x22, dtype=torch.uint8)
    e4m3 = torch.ones(4, 8).to(torch.float8_e4m3fn)
    tensors = {
        "m.q_proj.weight_packed": ones,
        "m.q_proj.weight_scale": e4m3,
        "m.q_proj.weight_global_scale": torch.tensor([2.0]),
        "m.up_proj.weight_packed": ones.clone(),
        "m.up_proj.weight_scale": torch.full((4, 4), 128, dtype=torch.uint8),
    }
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"group_size": 16}, "format": "mxfp4-pack-quantized"},
        "group_1": {"targets": ["re:.*q_proj"], "weights": {"group_size": 8}, "format": "nvfp4-pack-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    folder = write(tmp_path / "m", tensors, config)
    blocks = {w.module: (w.scheme.scale, w.scheme.block) for w in registry.find(Checkpoint(folder)).weights}
    assert blocks == {"m.q_proj": ("e4m3", 8), "m.up_proj": ("e8m0", 16)}
    mxquant.dequantize_model(folder, tmp_path / "d")
    found = load_file(tmp_path / "d" / "model.safetensors")
    assert found["m.q_proj.weight"].eq(0.5).all()
    assert found["m.up_proj.weight"].eq(2).all()


def test_groups_with_formats_of_their_own_load_packed_with_the_weights_of_each(tmp_path):
    """NVFP4 attention and MXFP4 MLP in one checkpoint; what 0.1.0 decoded of the two it is mixed from is the oracle."""
    made = ROOT / "tests" / "data" / "made_by_0_1_0"
    decoded = json.loads((made / "decoded.json").read_text(encoding="utf-8"))
    kinds = {"llama-nvfp4": "self_attn", "llama-mxfp4": "mlp"}
    stored = {kind: load_file(made / kind / "model.safetensors") for kind in kinds}
    mixed = {n: t for kind, part in kinds.items() for n, t in stored[kind].items() if part in n or "proj" not in n}
    config = json.loads((made / "llama-nvfp4" / "config.json").read_text(encoding="utf-8"))
    other = json.loads((made / "llama-mxfp4" / "config.json").read_text(encoding="utf-8"))
    said, group = config["quantization_config"], other["quantization_config"]["config_groups"]["group_0"]
    said["format"] = "mixed-precision"
    said["config_groups"]["group_1"] = {**group, "targets": [r"re:.*\.mlp\..*"]}
    folder = write(tmp_path / "m", mixed, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert not verify_checkpoint(folder).faults
    model = mxquant.load(folder)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, mxquant.QuantLinear)}
    assert len(layers) == 7
    for name, layer in layers.items():
        kind = next(kind for kind, part in kinds.items() if part in name)
        data = layer.dequantize(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        assert decoded[kind][f"{name}.weight"].endswith(hashlib.sha256(data).hexdigest()[:16]), name
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", ["FP8", "GPTQ", "compressed-tensors int4", "ModelOpt FP8", "Quark int8"])
def test_what_is_not_known_is_no_fault_of_the_checkpoint(kind, tmp_path):
    folder = write(tmp_path / "m", {"a.weight_packed": torch.zeros(4, 8, dtype=torch.int32)}, REFUSED[kind])
    with pytest.raises(registry.UnknownFormatError):
        verify_checkpoint(folder)


MALFORMED = {
    "groups in a list": {"quant_method": "compressed-tensors", "config_groups": [GROUP]},
    "a group that is a text": {"quant_method": "compressed-tensors", "config_groups": {"group_0": "nvfp4"}},
    "weights that are a text": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {**GROUP, "weights": "x"}},
    },
    "a pattern that is none": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {**GROUP, "targets": ["re:("]}},
    },
    "a group size in words": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": "sixteen"},
    "no settings": {"quant_method": "quark", "global_quant_config": ["fp4"]},
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_config_that_cannot_be_read_gives_one_line(kind, tmp_path):
    tensors = {"a.weight_packed": torch.zeros(4, 8, dtype=torch.uint8), "a.weight": torch.zeros(4, 8)}
    folder = write(tmp_path / "m", tensors, MALFORMED[kind])
    with pytest.raises(CheckpointError) as caught:
        registry.find(Checkpoint(folder))
    assert len(str(caught.value).splitlines()) == 1
    for command in (["dequantize", folder, tmp_path / "d"], ["verify", folder], ["inspect", folder]):
        result = run(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
