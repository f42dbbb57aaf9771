"""Quark's on-disk format of FP4: ``weight`` (uint8) and ``weight_scale`` (uint8, E8M0 or UE5M3); no global scale."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from mxquant.checkpoint.formats.base import Layout, PackedFormat, UnknownFormatError, named_by_globs, weights_of
from mxquant.checkpoint.formats.packed import PACKED, SCALE
from mxquant.checkpoint.headers import Tensors
from mxquant.schemes.formats import QuantScheme

# Names of scale formats in its config -> ours.
_SCALES = {"e8m0": "e8m0", "e5m3": "ue5m3"}


class QuarkFormat(PackedFormat):
    """Quark's MXFP4, and FP4 with UE5M3 scales."""

    method = "quark"
    suffixes = MappingProxyType({PACKED: "", SCALE: "_scale"})
    readers = ("vLLM", "SGLang")

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        said = (config.get("global_quant_config") or {}).get("weight")
        said = said if isinstance(said, dict) else {}
        scale = _SCALES.get(str(said.get("scale_format")))
        if said.get("dtype") != "fp4" or scale is None:
            raise UnknownFormatError(f"Quark's weights of {said.get('dtype')} are not supported; only fp4")
        scheme = QuantScheme(scale=scale, block=int(said.get("group_size") or 32))
        excluded = [str(name) for name in config.get("exclude") or ()]
        layout = Layout(self, list(weights_of(self, tensors, lambda module: scheme)))
        layout.must_be_dense = lambda module: _named(module, excluded)
        layout.must_be_packed = lambda module: not layout.must_be_dense(module)
        return layout

    def why_not_dense(self, config: dict[str, Any]) -> str | None:
        return "some of its layers have formats of their own" if config.get("layer_quant_config") else None


def _named(module: str, names: list[str]) -> bool:
    """Whether names, shell patterns or, after ``re:``, regular expressions name a module."""
    patterns = [name[3:] for name in names if name.startswith("re:")]
    return named_by_globs(module, names) or any(re.match(pattern, module) for pattern in patterns)
