"""The compressed-tensors on-disk format, for the two schemes it defines: NVFP4 and MXFP4.

Names, shapes and quirks are those of compressed-tensors 0.20: ``<module>.weight_packed`` (uint8),
``.weight_scale`` (float8_e4m3fn for NVFP4, uint8 exponents for MXFP4) and ``.weight_global_scale``
(fp32, the divisor). vLLM, SGLang and transformers read it without us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mxquant.errors import CheckpointError
from mxquant.schemes.formats import QuantScheme

QUANT_METHOD = "compressed-tensors"
SCHEMES = {
    "nvfp4-pack-quantized": QuantScheme.preset("nvfp4"),
    "mxfp4-pack-quantized": QuantScheme.preset("mxfp4"),
}
_WRITER_VERSION = "0.20.1"
# Its writer replaces zero block scales, which only blocks too small to hold anything have.
_ZERO_SCALE_STAND_IN = 0.125


def format_name(scheme: QuantScheme) -> str | None:
    """Name of the format in compressed-tensors' registry; None where it has none for the scheme."""
    for name, known in SCHEMES.items():
        if _layout(scheme) == _layout(known):
            return name
    return None


def _layout(scheme: QuantScheme) -> tuple[Any, ...]:
    """What of a scheme a reader must know; how scales were chosen and elements rounded is not part of it."""
    return scheme.element, scheme.scale, scheme.block, scheme.global_scale


def stored_scale(scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Block scales as the format's writer stores them."""
    if scheme.scale != "e4m3":
        return scale
    stand_in = torch.tensor(_ZERO_SCALE_STAND_IN).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = scale.view(torch.uint8)
    return torch.where(codes == 0, stand_in, codes).view(torch.float8_e4m3fn)


def build_config(scheme: QuantScheme, ignore: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose linear layers, but those named, have ``scheme``."""
    name = format_name(scheme)
    if name is None:
        raise ValueError(f"compressed-tensors has no format for {scheme.text}")
    nvfp4 = scheme.global_scale
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if nvfp4 else "group",
        "group_size": scheme.block,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
        "zp_dtype": None,
        "actorder": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": QUANT_METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": _WRITER_VERSION,
    }


def ignored(names: Mapping[str, str], quantized: Iterable[str]) -> list[str]:
    """Entries of ``ignore`` for dense layers. ``names``: what the files call each -> what the model does.

    Readers look for the one or the other. Where one has a prefix that the other lacks, a pattern fits
    both, unless it fits a layer of ``quantized`` as well; other names are both listed.
    """
    packed, found = list(quantized), []
    for file, model in names.items():
        short, long = sorted((file, model), key=len)
        pattern = rf"(.*\.)?{re.escape(short)}$"
        if file == model:
            found.append(file)
        elif long.endswith(f".{short}") and not any(re.match(pattern, name) for name in packed):
            found.append(f"re:{pattern}")
        else:
            found += [file, model]
    return found


def parse_config(config: dict[str, Any]) -> QuantScheme:
    """The scheme of a compressed-tensors checkpoint with packed FP4 weights.

    Raises ``CheckpointError`` for every other kind of compressed-tensors checkpoint.
    """
    groups = config.get("config_groups") or {}
    names = {str(config.get("format"))} | {g["format"] for g in groups.values() if g.get("format")}
    names.discard("mixed-precision")
    if len(names) != 1 or names - set(SCHEMES):
        kinds = ", ".join(sorted(names))
        raise CheckpointError(f"compressed-tensors format {kinds} is not supported; only {', '.join(SCHEMES)}")
    return SCHEMES[names.pop()]
