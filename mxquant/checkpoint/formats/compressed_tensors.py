"""The compressed-tensors on-disk format, for the two schemes it defines: NVFP4 and MXFP4.

Names, shapes and quirks are those of compressed-tensors 0.20: ``<module>.weight_packed`` (uint8),
``.weight_scale`` (float8_e4m3fn for NVFP4, uint8 exponents for MXFP4) and ``.weight_global_scale``
(fp32, the divisor). vLLM, SGLang and transformers read it without us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mxquant.checkpoint.formats.base import Layout, PackedFormat, UnknownFormatError, weights_of
from mxquant.checkpoint.formats.packed import GLOBAL_SCALE, PACKED, SCALE, PackedWeight
from mxquant.checkpoint.headers import Tensors
from mxquant.errors import CheckpointError
from mxquant.schemes.activations import ActivationScheme
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
        if scheme.layout == known.layout:
            return name
    return None


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


class CompressedTensorsFormat(PackedFormat):
    """NVFP4 and MXFP4 of compressed-tensors, each layer in the format of the group of the config that targets it."""

    method = QUANT_METHOD
    suffixes = MappingProxyType({PACKED: "_packed", SCALE: "_scale", GLOBAL_SCALE: "_global_scale"})
    readers = ("vLLM", "SGLang", "transformers")

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        formats = _formats(config)
        if formats and not formats & set(SCHEMES):
            raise _unknown(formats)
        groups = _groups(config)
        ignore = [str(name) for name in config.get("ignore") or ()]
        layout = Layout(self)
        layout.must_be_dense = lambda module: _named(module, ignore)
        layout.must_be_packed = lambda module: not _named(module, ignore) and _group_of(module, groups) is not None

        def scheme_of(module: str) -> QuantScheme | None:
            group = _group_of(module, groups)
            return None if group is None else _scheme_of_group(group, config)

        layout.weights = list(weights_of(self, tensors, scheme_of))
        layout.stale = _unused(ignore, tensors)
        return layout

    def why_not_dense(self, config: dict[str, Any]) -> str | None:
        others = sorted(_formats(config) - set(SCHEMES))
        if others:
            return f"some of its weights are {', '.join(others)}"
        if config.get("transform_config"):
            return "its weights are transformed (transform_config)"
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            return "its weights are sparse (sparsity_config)"
        return None

    def why_not_packed(self, config: dict[str, Any]) -> str | None:
        return self.why_not_dense(config) if _formats(config) else "its config has no groups"

    def why_not(self, weight: PackedWeight) -> str | None:
        if format_name(weight.scheme) is None:
            return "no other format holds this scheme"
        if weight.activations:
            return "it says what activations are rounded to as the model runs"
        if weight.experts is not None:
            return f"{weight.name} holds the matrices of all experts, for which compressed-tensors has no name"
        columns = weight.shape[1]
        if columns % weight.scheme.block_shape[1]:
            return f"{weight.name} has {columns} input features, not a whole number of blocks"
        if weight.transposed:
            return f"{weight.name} is stored transposed, which compressed-tensors cannot say"
        return None

    def stored_scale(self, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        return stored_scale(scale, scheme)

    def config_block(
        self,
        weights: Iterable[PackedWeight],
        *,
        names: Iterable[str],
        dense: Iterable[str],
        kv_cache: ActivationScheme | None = None,
    ) -> dict[str, Any]:
        return build_config(next(iter(weights)).scheme, dense)


def _formats(config: dict[str, Any]) -> set[str]:
    """The formats of all groups."""
    return {str(group.get("format") or config.get("format")) for group in _groups(config)}


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    found = config.get("config_groups") or {}
    if not isinstance(found, dict) or not all(isinstance(group, dict) for group in found.values()):
        raise CheckpointError("config_groups of the quantization_config is not an object of objects")
    return list(found.values())


def _unknown(formats: Iterable[str]) -> UnknownFormatError:
    kinds = ", ".join(sorted(formats))
    return UnknownFormatError(f"compressed-tensors format {kinds} is not supported; only {', '.join(SCHEMES)}")


def _scheme_of_group(group: dict[str, Any], config: dict[str, Any]) -> QuantScheme:
    name = str(group.get("format") or config.get("format"))
    if name not in SCHEMES:
        raise _unknown([name])
    size = (group.get("weights") or {}).get("group_size")
    scheme = SCHEMES[name]
    return scheme if size is None else replace(scheme, block=int(size))


def _group_of(module: str, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The group that targets a linear layer: by name or pattern, else by class."""
    targets = [[str(target) for target in group.get("targets") or ()] for group in groups]
    for group, names in zip(groups, targets, strict=True):
        if _named(module, names):
            return group
    return next((group for group, names in zip(groups, targets, strict=True) if "Linear" in names), None)


def _named(module: str, names: Iterable[str]) -> bool:
    """Whether a list in compressed-tensors' manner (``re:`` starts a pattern) names a module."""
    return any(re.match(n[3:], module) if n.startswith("re:") else n == module for n in names)


def _unused(names: Iterable[str], tensors: Tensors) -> list[str]:
    """Names, patterns aside, of modules that the files do not hold; a tied head has no tensor of its own."""
    modules = {name.rpartition(".")[0] for name in tensors}
    return [n for n in names if not n.startswith("re:") and n != "lm_head" and n not in modules]
