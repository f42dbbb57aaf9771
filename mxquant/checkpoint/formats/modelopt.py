"""ModelOpt's on-disk format of NVFP4: ``weight`` (uint8), ``weight_scale`` (float8_e4m3fn) and ``weight_scale_2``.

``weight_scale_2`` is fp32 and *multiplies* the block scales, ``value = element * fl32(scale * scale_2)``.
The config is ``hf_quant_config.json``, or the ``quantization_config`` of ``config.json``, or both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mxquant.checkpoint.formats.base import (
    Layout,
    PackedFormat,
    UnknownFormatError,
    named_by_globs,
    read_side_file,
    weights_of,
)
from mxquant.checkpoint.formats.packed import GLOBAL_SCALE, PACKED, SCALE, Matrix
from mxquant.checkpoint.headers import Tensors
from mxquant.codec.numerics import decode_scale
from mxquant.codec.qtensor import QTensor
from mxquant.errors import CheckpointError
from mxquant.schemes.formats import SCALES, QuantScheme

_MIXED = "MIXED_PRECISION"


class ModelOptFormat(PackedFormat):
    """ModelOpt's NVFP4, alone or beside layers in other precisions."""

    method = "modelopt"
    suffixes = MappingProxyType({PACKED: "", SCALE: "_scale", GLOBAL_SCALE: "_scale_2"})
    side_file = "hf_quant_config.json"
    readers = ("vLLM", "SGLang")
    multiplies = True

    def describe(self, folder: Path) -> dict[str, Any] | None:
        said = read_side_file(folder / self.side_file)
        if said is None:
            return None
        if not isinstance(said.get("quantization"), dict):
            raise CheckpointError(f"{self.side_file}: not a description of a quantization (no 'quantization')")
        return {"quant_method": self.method, **said["quantization"]}

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        algorithm = str(config.get("quant_algo"))
        if "NVFP4" not in algorithm and algorithm != _MIXED:
            raise UnknownFormatError(f"ModelOpt's {algorithm} is not supported; only NVFP4")
        scheme = QuantScheme.preset("nvfp4", block=int(config.get("group_size") or 16))
        excluded = [str(name) for name in (config.get("exclude_modules") or config.get("ignore") or ())]
        layout = Layout(self, list(weights_of(self, tensors, lambda module: scheme)))
        layout.must_be_dense = lambda module: named_by_globs(module, excluded)
        if algorithm != _MIXED:
            layout.must_be_packed = lambda module: not layout.must_be_dense(module)
        return layout

    def why_not_dense(self, config: dict[str, Any]) -> str | None:
        algorithm = str(config.get("quant_algo"))
        if algorithm == _MIXED:
            return f"{algorithm} may hold weights in other formats than NVFP4"
        return "its weights are scaled for inputs that are scaled too (AWQ)" if "AWQ" in algorithm else None

    def qtensor(self, matrix: Matrix) -> QTensor:
        """With the reciprocal of ``scale_2`` as global scale where that gives the same numbers, bit for bit;
        else with the products ``fl32(scale * scale_2)`` as fp32 block scales."""
        factor, weight = matrix.global_scale, matrix.weight
        assert factor is not None
        divisor = divisor_of(float(factor))
        if divisor is not None:
            one = torch.tensor([divisor], device=factor.device)
            return QTensor(matrix.packed, matrix.scale, one, weight.shape, weight.scheme)
        products = decode_scale(matrix.scale, weight.scheme.scale_format) * factor
        scheme = replace(weight.scheme, scale="fp32", global_scale=False, scale_rule=None)
        return QTensor(matrix.packed, products, None, weight.shape, scheme)


@lru_cache(maxsize=4096)
def divisor_of(factor: float) -> float | None:
    """The fp32 number by which E4M3 scales divided are what they are times ``factor``; None if there is none.

    Tried are the rounded reciprocal and its neighbours, on all scales there are.
    """
    scales = decode_scale(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn), SCALES["e4m3"])
    one = torch.tensor(factor, dtype=torch.float32)
    near = 1 / one
    if not (one > 0 and one.isfinite() and near.isfinite() and near > 0):
        return None
    for step in (0, -1, 1):
        candidate = (near.view(torch.int32) + step).view(torch.float32)
        if torch.equal(scales / candidate, scales * one):
            return float(candidate)
    return None
