"""``mxquant inspect``: packed weights of every known format found and decoded, numbers counted right."""

from __future__ import annotations

import io
import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

import mxquant
import mxquant.bundled
from mxquant.checkpoint.formats.registry import find as find_layout
from mxquant.checkpoint.reader import Checkpoint
from mxquant.cli.inspect_tables import bar, share, weight_table
from mxquant.cli.main import main
from mxquant.errors import CheckpointError
from mxquant.inspection.statistics import DenseStats, ScaleStats
from mxquant.inspection.summary import inspect_checkpoint, inspect_tensor, open_checkpoint
from mxquant.schemes.formats import ELEMENTS, SCALES, QuantScheme

ROWS, COLUMNS = 6, 64
E4M3 = torch.float8_e4m3fn


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def write(folder, tensors, quantization, **more):
    folder.mkdir(exist_ok=True)
    config = {"model_type": "made-up", "architectures": ["MadeUp"], **more}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_codes(*shape, low=0, high=256, seed=0):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def elements(packed):
    """fp4 values of packed bytes by ml_dtypes, the even index from the low nibble."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(*packed.shape[:-1], -1)
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def scaled(packed, scale, block):
    return elements(packed) * np.repeat(scale.astype(np.float32), block, axis=-1)


def e8m0(codes):
    return codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def e4m3(codes):
    return codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def ue5m3(codes):
    return (codes.numpy().astype(np.uint16) << 7).view(np.float16).astype(np.float32)


PACKED = random_codes(ROWS, COLUMNS // 2)
NV_SCALE = random_codes(ROWS, COLUMNS // 16, low=1, high=127, seed=1)
MX_SCALE = random_codes(ROWS, COLUMNS // 32, low=100, high=140, seed=2)
GLOBAL = torch.tensor([1234.567])


def foreign(kind):
    """Tensors, config and the dense values of a layer ``a.b`` in a format of others, and further files."""
    ct = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    if kind == "compressed-tensors nvfp4":
        tensors = {"weight_packed": PACKED, "weight_scale": NV_SCALE.view(E4M3), "weight_global_scale": GLOBAL}
        tensors["input_global_scale"] = torch.ones(1)
        groups = {"group_0": {"targets": ["Linear"], "weights": {"group_size": 16}, "format": "nvfp4-pack-quantized"}}
        return tensors, ct | {"config_groups": groups}, scaled(PACKED, e4m3(NV_SCALE) / GLOBAL.numpy(), 16), {}
    if kind == "compressed-tensors mxfp4":
        tensors = {"weight_packed": PACKED, "weight_scale": MX_SCALE}
        groups = {"group_0": {"targets": ["re:.*b$"], "weights": {"group_size": 32}}}
        config = ct | {"format": "mxfp4-pack-quantized", "config_groups": groups}
        return tensors, config, scaled(PACKED, e8m0(MX_SCALE), 32), {}
    if kind.startswith("modelopt"):
        tensors = {"weight": PACKED, "weight_scale": NV_SCALE.view(E4M3), "weight_scale_2": GLOBAL[0]}
        tensors["input_scale"] = torch.tensor(1.0)
        said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        dense = scaled(PACKED, e4m3(NV_SCALE) * GLOBAL.numpy(), 16)
        if kind == "modelopt in its own file":
            return tensors, None, dense, {"hf_quant_config.json": json.dumps({"quantization": said})}
        return tensors, {"quant_method": "modelopt", **said}, dense, {}
    scale, values, size = ("e8m0", e8m0, 32) if kind == "quark mxfp4" else ("e5m3", ue5m3, 16)
    codes = MX_SCALE if scale == "e8m0" else NV_SCALE
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": size, "scale_format": scale}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": []}
    return {"weight": PACKED, "weight_scale": codes}, config, scaled(PACKED, values(codes), size), {}


FOREIGN = (
    "compressed-tensors nvfp4",
    "compressed-tensors mxfp4",
    "modelopt",
    "modelopt in its own file",
    "quark mxfp4",
    "quark ue5m3",
)


@pytest.mark.parametrize("kind", FOREIGN)
def test_weights_in_the_formats_of_others_are_found_and_decode_to_the_right_numbers(kind, tmp_path):
    tensors, config, dense, files = foreign(kind)
    named = {f"a.b.{name}": t for name, t in tensors.items()} | {"a.norm.weight": torch.ones(COLUMNS)}
    folder = write(tmp_path, named, config)
    for name, text in files.items():
        (folder / name).write_text(text)
    checkpoint = Checkpoint(folder)
    layout = find_layout(checkpoint)
    (weight,) = layout.weights
    assert weight.name == "a.b.weight"
    assert weight.shape == (ROWS, COLUMNS)
    assert not layout.unlisted
    (matrix,) = weight.read(checkpoint)
    assert np.array_equal(matrix.dequantize(0, ROWS).numpy(), dense)
    found = inspect_checkpoint(checkpoint)
    assert found.method == kind.split()[0]
    parts = [t for name, t in tensors.items() if name.startswith("weight")]
    stored = sum(t.numel() * t.element_size() for t in parts)
    assert found.bits_per_weight == 8 * stored / (ROWS * COLUMNS)
    assert found.roles["a.norm.weight"] == "dense"
    assert {found.roles[n] for n in named if "input" in n} <= {"activation scale"}


def test_gpt_oss_experts_decode_to_what_transformers_makes_of_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_codes(3, 8, 2, 16), random_codes(3, 8, 2, low=110, high=135, seed=1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(3, 8)}
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": []}))
    (weight,) = find_layout(checkpoint).weights
    assert (weight.name, weight.shape, weight.experts) == (name, (8, 64), 3)
    dense = torch.stack([m.dequantize(0, 8) for m in weight.read(checkpoint)]).transpose(1, 2)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert weight.dense_shape == tuple(theirs.shape)
    assert torch.equal(dense, theirs)
    assert inspect_checkpoint(checkpoint).bits_per_weight == 4.25


@pytest.mark.parametrize("text", ["ue5m3/16", "e4m3+global/8", "mxfp6", "mxfp8", "ue5m3/8x8", "fp32/16"])
def test_our_own_weights_decode_to_what_dequantizing_the_model_gives(text, make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "q", QuantScheme.parse(text))
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d", dtype=torch.float32)
    dense, checkpoint = load_file(tmp_path / "d/model.safetensors"), Checkpoint(tmp_path / "q")
    weights = find_layout(checkpoint).weights
    assert len(weights) == 14
    for weight in weights:
        (matrix,) = weight.read(checkpoint)
        rows = [matrix.dequantize(start, stop) for start, stop in matrix.chunks(512)]
        assert len(rows) > 1
        assert torch.equal(torch.cat(rows), dense[weight.name])
    report = json.loads((tmp_path / "q/quantization_report.json").read_text())
    assert inspect_checkpoint(checkpoint).bits_per_weight == report["bits_per_weight"]


@pytest.mark.parametrize("name", SCALES)
def test_scales_are_counted_as_a_loop_over_their_values_counts_them(name):
    fmt = SCALES[name]
    if fmt.coded:
        stored = random_codes(5, 700)
        values = [fmt.value(int(c)) for c in stored.flatten()]
        largest = int((stored == fmt.max_code).sum())
    else:
        values = [*(10.0**e for e in range(-30, 30)), 0.0, 0.0, math.nan, -1.0, math.inf]
        stored, largest = torch.tensor(values).to(getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[name])), 0
        values = [float(v) for v in stored]
    stats = ScaleStats(fmt)
    stats.add(stored if name != "e4m3" else stored.view(E4M3))
    good = [v for v in values if v > 0 and math.isfinite(v)]
    assert stats.count == len(values)
    assert stats.zero == values.count(0.0)
    assert stats.invalid == len(values) - len(good) - values.count(0.0)
    assert stats.subnormal == sum(v < fmt.min_normal for v in good)
    assert stats.largest == largest
    for exponent, n in stats.binades.items():
        assert n == sum(2.0**exponent <= v < 2.0 ** (exponent + 1) for v in good)
    assert sum(stats.binades.values()) == len(good)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("columns", [64, 37])
def test_element_codes_are_counted_without_the_padding(element, columns, tmp_path):
    scheme = QuantScheme(element=element, scale="fp32", block=16)
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(3))
    weight[2] = 0
    q = mxquant.quantize(weight, scheme)
    config = {
        "quant_method": "mxquant", "format_version": 1, "mxquant_version": "0", "schemes": {"s": scheme.to_dict()},
        "modules": [{"names": ["a"], "scheme": "s", "shape": [9, columns], "transposed": False}],
    }  # fmt: skip
    packed = q.packed.flatten() if scheme.element_format.bits == 8 else q.packed
    write(tmp_path, {"a.weight": packed, "a.weight_scale": q.scale}, config)
    _, found = inspect_tensor(Checkpoint(tmp_path), "a")
    stats = found.elements
    fmt, bits = ELEMENTS[element], ELEMENTS[element].bits
    streams = [int.from_bytes(bytes(row.tolist()), "little") for row in q.packed]
    codes = [stream >> (bits * i) & (2**bits - 1) for stream in streams for i in range(columns)]
    assert stats.codes == [codes.count(c) for c in range(2**bits)]
    magnitudes = [abs(fmt.value(c)) for c in codes]
    assert stats.count == 9 * columns
    assert stats.zero == magnitudes.count(0) >= columns
    assert stats.largest == magnitudes.count(fmt.max) > 0
    assert stats.subnormal == sum(0 < m < 2.0**fmt.min_exponent for m in magnitudes)
    assert stats.invalid == 0


def test_dense_values_are_described_as_numpy_describes_them():
    x = torch.randn(301, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[0, :4] = torch.tensor([0.0, math.nan, math.inf, -math.inf])
    stats, good = DenseStats.of(x), x[x.isfinite()].double().numpy()
    assert (stats.count, stats.zero, stats.nan, stats.infinite) == (x.numel(), 1, 1, 2)
    assert stats.mean == pytest.approx(good.mean(), rel=1e-12)
    assert stats.std == pytest.approx(good.std(), rel=1e-12)
    assert (stats.smallest, stats.largest, stats.amax) == (good.min(), good.max(), np.abs(good).max())
    exponents = np.floor(np.log2(np.abs(good[good != 0])))
    assert dict(stats.binades) == dict(zip(*np.unique(exponents, return_counts=True), strict=True))


def test_nothing_is_counted_twice_or_left_out(tmp_path):
    mxquant.quantize_model(mxquant.bundled.path(), tmp_path / "q", "nvfp4")
    data = json.loads(run("inspect", tmp_path / "q", "--json").stdout)
    header = 8 + int.from_bytes((tmp_path / "q/model.safetensors").read_bytes()[:8], "little")
    assert sum(t["bytes"] for t in data["tensors"]) == data["files"][0]["bytes"] - header
    dense = json.loads(run("inspect", mxquant.bundled.path(), "--json").stdout)
    assert data["parameters"] == dense["parameters"]
    assert dense["quant_method"] is None
    assert sum(w["parameters"] for w in data["weights"]) == data["packed_parameters"] == 1382400
    (scales,), (elements_,) = data["scales"].values(), data["elements"].values()
    assert scales["count"] == data["packed_parameters"] / 16
    assert elements_["count"] == sum(elements_["codes"]) == data["packed_parameters"]


def test_one_tensor_is_found_by_every_name_of_it(tmp_path):
    mxquant.quantize_model(mxquant.bundled.path(), tmp_path / "q", "nvfp4")
    layer = "model.layers.0.mlp.down_proj"
    found = [run("inspect", tmp_path / "q", f"{layer}{end}", "--json") for end in ("", ".weight", ".weight_scale")]
    module, weight, scale = (json.loads(r.stdout) for r in found)
    assert module == weight
    assert scale["weight"] == weight["weight"]
    assert (scale["name"], scale["dtype"]) == (f"{layer}.weight_scale", "F8_E4M3")
    assert weight["weight"]["global_scale_is"] == "divisor"
    text = run("inspect", tmp_path / "q", layer).stdout
    assert "divides the block scales" in text
    assert text.count("█") > 20
    assert "std 0.1955" in run("inspect", tmp_path / "q", "model.norm").stdout
    missing = run("inspect", tmp_path / "q", "model.layers.0.mlp.down_prj")
    assert missing.exit_code == 1
    assert layer in missing.stderr
    assert len(missing.stderr.splitlines()) == 1


def test_headers_alone_are_enough_for_sizes(monkeypatch):
    def never(self, name):
        raise AssertionError("read")

    monkeypatch.setattr(Checkpoint, "read", never)
    data = json.loads(run("inspect", mxquant.bundled.path(), "--headers-only", "--json").stdout)
    assert data["parameters"] == 1711840
    assert "values" not in data["tensors"][0]
    assert run("inspect", mxquant.bundled.path(), "--headers-only").exit_code == 0


def test_a_quantization_of_others_is_listed_and_named(tmp_path):
    write(tmp_path, {"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}, {"quant_method": "gptq", "bits": 4})
    data = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert "gptq" in data["not_understood"]
    assert [t["name"] for t in data["tensors"]] == ["a.qweight"]
    assert "Not understood" in run("inspect", tmp_path).stdout
    with pytest.raises(CheckpointError, match="gptq"):
        inspect_tensor(open_checkpoint(tmp_path), "a.qweight")


@pytest.mark.parametrize("fault", ["NaN", "zero"])
def test_what_is_wrong_shows(fault, tmp_path):
    tensors, config, _, _ = foreign("compressed-tensors nvfp4")
    scale = NV_SCALE.clone()
    scale[0, 0] = 0x7F if fault == "NaN" else 0
    tensors["weight_scale"] = scale.view(E4M3)
    write(tmp_path, {f"a.b.{name}": t for name, t in tensors.items()}, config)
    text = run("inspect", tmp_path, "a.b").stdout
    assert ("invalid" if fault == "NaN" else "zero ") in text


def test_tables_keep_their_names_in_a_narrow_terminal(tmp_path):
    mxquant.quantize_model(mxquant.bundled.path(), tmp_path / "q", "nvfp4")
    weights = inspect_checkpoint(Checkpoint(tmp_path / "q")).weights
    for width, count in [(80, 2), (160, 1)]:
        tables = weight_table(weights).parts(width)
        assert len(tables) == count
        for table in tables:
            out = Console(width=width, file=io.StringIO())
            out.print(table)
            text = out.file.getvalue()
            assert "…" not in text


def test_bars_and_shares_do_not_hide_what_is_small():
    assert bar(0, 10) == ""
    assert bar(1, 10**9) == "▏"
    assert bar(10, 10) == "█" * 40
    assert [share(n, 10**6) for n in (0, 1, 50, 10**6)] == ["0", "<0.01%", "0.01%", "100.00%"]


def test_a_wrong_request_gives_one_line(tmp_path):
    for args, code, word in [
        (("./nowhere",), 1, "no such folder"),
        ((mxquant.bundled.path(), "a", "--headers-only"), 2, "--headers-only"),
        ((tmp_path,), 1, "config.json"),
    ]:
        result = run("inspect", *args)
        assert result.exit_code == code
        assert word in result.stderr
        assert "Traceback" not in result.output
