"""NVFP4 and MXFP4 bytes equal those that compressed-tensors' own compressors make of fp32 weights.

Two quirks of that library, version 0.20, are part of the comparison. It stores 0.125 where a block
scale rounds to zero. And its CPU rounding multiplies by ``sign(x)``, so a weight of exactly -0.0
gets the code of +0.0 where ours keeps the sign; no value differs.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

import mxquant
from mxquant.checkpoint.formats.compressed_tensors import stored_scale
from mxquant.codec.numerics import effective_scale
from mxquant.codec.packing import pack, unpack
from mxquant.codec.qtensor import QTensor
from mxquant.schemes.formats import PRESETS, QuantScheme

NVFP4 = QuantScheme.preset("nvfp4", scale_rule="absmax")
MXFP4 = QuantScheme.preset("mxfp4", scale_rule="even")
COMPRESSORS = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}


pytestmark = pytest.mark.usefixtures("implementation")


def arguments(kind: str) -> QuantizationArgs:
    common = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if kind == "nvfp4":
        return QuantizationArgs(strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, **common)
    return QuantizationArgs(strategy="group", group_size=32, scale_dtype=torch.uint8, **common)


def compress(kind: str, w: torch.Tensor, global_scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    args = arguments(kind)
    groups = w.unflatten(-1, (-1, args.group_size))
    state = {"weight": w.clone()}
    if kind == "nvfp4":
        global_scale = generate_gparam(w.min(), w.max()) if global_scale is None else global_scale
        state["weight_global_scale"] = global_scale
    state["weight_scale"], _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return COMPRESSORS[kind].compress(state, scheme)


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(rows: int = 128, columns: int = 512) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g)

    w = {f"normal {sigma:g}": normal() * sigma for sigma in (1e-20, 1e-6, 1e-3, 0.02, 1.0, 300.0, 1e20)}
    w["heavy tails"] = normal() ** 5
    w["outliers"] = normal() * 0.02
    w["outliers"].view(-1)[::1013] = 7.5
    w["zero blocks"] = normal() * 0.02
    w["zero blocks"][::3, 64:192] = 0
    w["tiny blocks"] = normal() * torch.logspace(-9, 1, 128)[:, None]
    w["denormal blocks"] = normal()
    w["denormal blocks"][5, :64] = 1e-40
    w["denormal blocks"][6, :64] = -(2.0**-149)
    w["bf16"] = (normal() * 0.02).bfloat16().float()
    w["fp4 grid and ties"] = (normal() * 4).round() / 4
    w["fp4 grid and ties"][:, ::16] = 6.0
    w["negative"] = -normal().abs()
    w["positive"] = normal().abs()
    w["one row"] = normal(1, 32)
    return w


WEIGHTS = weights()


def without_sign_of_zero(packed: torch.Tensor, columns: int) -> torch.Tensor:
    codes = unpack(packed, 4, columns)
    return pack(torch.where(codes == 8, 0, codes).to(torch.uint8), 4)


def assert_codes_equal(ours: QTensor, theirs: torch.Tensor, w: torch.Tensor) -> None:
    differs = unpack(ours.packed, 4, w.shape[1]) != unpack(theirs, 4, w.shape[1])
    scale = effective_scale(ours.scale, ours.scheme.scale_format, ours.global_scale)
    quotient = w / scale.repeat_interleave(ours.scheme.block_shape[1], 1)
    # Only where the quotient is a negative zero, their sign of zero is lost.
    assert not (differs & ~((quotient == 0) & torch.signbit(w))).any()
    columns = w.shape[1]
    assert torch.equal(without_sign_of_zero(ours.packed, columns), without_sign_of_zero(theirs, columns))


@pytest.mark.parametrize("name", WEIGHTS)
def test_nvfp4_bytes_equal_compressed_tensors(name):
    w = WEIGHTS[name]
    theirs, ours = compress("nvfp4", w), mxquant.quantize(w, NVFP4)
    assert torch.equal(theirs["weight_global_scale"], ours.global_scale)
    stored = stored_scale(ours.scale, NVFP4)
    assert stored.dtype == theirs["weight_scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(stored.view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
    assert_codes_equal(ours, theirs["weight_packed"], w)
    if name.startswith(("normal", "bf16", "heavy", "tiny", "outliers", "negative")):
        assert torch.equal(theirs["weight_packed"], ours.packed)  # to the last sign


@pytest.mark.parametrize("name", WEIGHTS)
def test_mxfp4_bytes_equal_compressed_tensors(name):
    w = WEIGHTS[name]
    theirs, ours = compress("mxfp4", w), mxquant.quantize(w, MXFP4)
    assert set(theirs) == {"weight_packed", "weight_scale"}
    assert theirs["weight_scale"].dtype == torch.uint8
    assert torch.equal(stored_scale(ours.scale, MXFP4), theirs["weight_scale"])
    assert_codes_equal(ours, theirs["weight_packed"], w)
    if name.startswith(("normal", "bf16", "heavy", "tiny", "outliers", "negative")):
        assert torch.equal(theirs["weight_packed"], ours.packed)


def test_nvfp4_bytes_equal_compressed_tensors_under_a_global_scale_of_a_larger_group():
    w = WEIGHTS["normal 0.02"]
    for factor in (1.0, 1.37, 3.0, 50.0, 1e4):
        g = generate_gparam(w.min() * factor, w.max() * factor)
        theirs, ours = compress("nvfp4", w, g), mxquant.quantize(w, NVFP4, global_scale=g)
        assert torch.equal(ours.global_scale, g)
        assert torch.equal(stored_scale(ours.scale, NVFP4).view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
        assert torch.equal(ours.packed, theirs["weight_packed"])


def test_nvfp4_scales_at_the_borders_of_rounding_equal_compressed_tensors():
    """Blocks whose scale is within an ulp or two of a tie: there the order of the fp32 operations shows."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    ties = (e4m3[1:] + e4m3[:-1]) / 2
    otherwise = 0
    for g in torch.logspace(1, 5, 41).float():
        nearest = (ties * 6 / g.double()).float().view(torch.int32)
        amax = (nearest + torch.arange(-3, 4).view(-1, 1)).int().view(torch.float32).view(-1)
        w = torch.zeros(len(amax), 16)
        w[:, 5] = amax
        theirs, ours = compress("nvfp4", w, g.view(1)), mxquant.quantize(w, NVFP4, global_scale=g.view(1))
        assert torch.equal(stored_scale(ours.scale, NVFP4).view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
        assert torch.equal(ours.packed, theirs["weight_packed"])
        other_order = (g * amax / 6).clamp(max=448).to(torch.float8_e4m3fn)
        otherwise += int((other_order.float() != ours.scale.view(-1).float()).sum())
    assert otherwise > 100


def test_zero_blocks_are_stored_as_compressed_tensors_stores_them():
    w = torch.zeros(2, 64)
    w[1] = torch.linspace(-1, 1, 64)
    nvfp4, mxfp4 = compress("nvfp4", w), compress("mxfp4", w)
    assert (nvfp4["weight_scale"][0].float() == 0.125).all()
    assert (mxfp4["weight_scale"][0] == 0).all()
    assert mxquant.quantize(w, MXFP4).scale[0].tolist() == [0, 0]
    ours = mxquant.quantize(w, NVFP4).scale
    assert (ours[0].float() == 0).all()
    assert (stored_scale(ours, NVFP4)[0].float() == 0.125).all()
    assert torch.equal(stored_scale(ours, NVFP4)[1].float(), ours[1].float())


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("rule", ["standard", "search"])
def test_compressed_tensors_reads_our_bytes_as_the_values_we_do(kind, rule):
    scheme = {"nvfp4": NVFP4, "mxfp4": MXFP4}[kind] if rule == "standard" else QuantScheme.preset(kind, scale_rule=rule)
    for name in ("outliers", "zero blocks", "tiny blocks"):
        w = WEIGHTS[name]
        q = mxquant.quantize(w, scheme)
        state = {"weight_packed": q.packed, "weight_scale": stored_scale(q.scale, scheme)}
        if q.global_scale is not None:
            state["weight_global_scale"] = q.global_scale
        args = QuantizationScheme(targets=["Linear"], weights=arguments(kind))
        theirs = COMPRESSORS[kind].decompress(state, args)["weight"]
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(theirs, q.dequantize(torch.bfloat16))


def test_presets_lay_out_what_compressed_tensors_defines():
    for kind, scheme in (("nvfp4", PRESETS["nvfp4"]), ("mxfp4", PRESETS["mxfp4"])):
        q, theirs = mxquant.quantize(WEIGHTS["one row"], scheme), compress(kind, WEIGHTS["one row"])
        assert q.packed.shape == theirs["weight_packed"].shape
        assert q.scale.shape == theirs["weight_scale"].shape
        assert q.scale.dtype == theirs["weight_scale"].dtype


def test_only_compressed_tensors_loses_the_sign_of_a_zero_weight():
    w = WEIGHTS["normal 0.02"].clone()
    w[:, 3] = -0.0
    for kind, scheme in (("nvfp4", NVFP4), ("mxfp4", MXFP4)):
        theirs, ours = (
            unpack(compress(kind, w)["weight_packed"], 4, 512),
            unpack(mxquant.quantize(w, scheme).packed, 4, 512),
        )
        assert (theirs[:, 3] == 0).all()
        assert (ours[:, 3] == 8).all()
        assert torch.equal(theirs[:, 4:], ours[:, 4:])
