"""Which tensors of a checkpoint are packed weights, for each on-disk format that is known here.

==================  =========================================================================
mxquant             ``weight``, ``weight_scale``, ``weight_global_scale``: :mod:`mxquant.checkpoint.formats.native`
compressed-tensors  ``weight_packed``, ``weight_scale``, ``weight_global_scale`` (divides): NVFP4, MXFP4
modelopt            ``weight``, ``weight_scale``, ``weight_scale_2`` (multiplies): NVFP4
quark               ``weight``, ``weight_scale``: MXFP4, and FP4 with UE5M3 scales
mxfp4               ``<name>_blocks`` ``[experts, out, blocks, 16]``, ``<name>_scales``: gpt-oss
==================  =========================================================================

Our own config gives shapes; for the others they follow from the packed tensor, and the config says
which layers must be packed and in what format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from mxquant.checkpoint.formats import compressed_tensors, native
from mxquant.checkpoint.layout import FLOAT_DTYPES
from mxquant.checkpoint.reader import Checkpoint, TensorInfo
from mxquant.checkpoint.writer import DTYPE_NAMES
from mxquant.codec.numerics import scale_dtype
from mxquant.errors import CheckpointError
from mxquant.inspection.packed import PackedWeight, Part
from mxquant.schemes.formats import QuantScheme

MODELOPT, QUARK, GPT_OSS = "modelopt", "quark", "mxfp4"
# Of layers whose inputs are quantized with a scale from calibration; not part of the weight.
_ACTIVATION_SCALE = re.compile(r"\.(input|output|q|k|v)_(global_)?scale$")
_SCALE = re.compile(r"(_scales?|_scale_2|_global_scale|_blocks)$")
_QUARK_SCALES = {"e8m0": "e8m0", "e5m3": "ue5m3"}


class UnknownFormatError(CheckpointError):
    """A quantization that is not known here: the checkpoint may well be right."""


@dataclass
class Layout:
    """The packed weights of a checkpoint.

    Attributes
    ----------
    method : ``quant_method`` of the config; None for a dense checkpoint.
    weights : in file order.
    activation_scales : tensors that only quantized inputs need.
    unlisted : tensors that look packed, or like scales, and belong to no weight.
    unmatched : entries of the config that no tensor matches.
    stale : names that the config keeps dense and the files do not hold; harmless.
    must_be_packed : whether the config says so of a linear layer; None where it lists what is packed.
    must_be_dense : whether the config says so of a module.
    """

    method: str | None
    weights: list[PackedWeight] = field(default_factory=list)
    activation_scales: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    must_be_packed: Callable[[str], bool] | None = None
    must_be_dense: Callable[[str], bool] = lambda module: False

    @property
    def part_names(self) -> set[str]:
        return {part.name for w in self.weights for part in w.parts.values()}


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What the checkpoint says of its quantization, wherever its writer puts that; None if dense."""
    nested = checkpoint.config.get("text_config")
    nested = nested if isinstance(nested, dict) else {}
    found = checkpoint.config.get("quantization_config") or nested.get("quantization_config")
    extra = checkpoint.folder / "hf_quant_config.json"
    if not extra.exists():
        return found if isinstance(found, dict) else None
    try:
        said = json.loads(extra.read_text())["quantization"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{extra.name}: not a description of a quantization ({error!r})") from error
    return {"quant_method": MODELOPT, **said, **(found or {})}


def find_layout(checkpoint: Checkpoint) -> Layout:
    """The packed weights of a checkpoint.

    Raises ``UnknownFormatError`` for a method or format that is not known here, and
    ``CheckpointError`` for a config that cannot be read.
    """
    config = quantization_of(checkpoint)
    if config is None:
        layout = Layout(None)
    else:
        method = str(config.get("quant_method"))
        if method not in _FINDERS:
            raise UnknownFormatError(f"{checkpoint.folder} is quantized by {method}; known are {', '.join(_FINDERS)}")
        layout = _FINDERS[method](checkpoint, config)
    parts = layout.part_names
    for info in checkpoint.tensors.values():
        if info.name in parts:
            continue
        if _ACTIVATION_SCALE.search(info.name):
            layout.activation_scales.append(info.name)
        elif _looks_packed(info, checkpoint):
            layout.unlisted.append(info.name)
    return layout


def _looks_packed(info: TensorInfo, checkpoint: Checkpoint) -> bool:
    """Whether a tensor that nothing claims must be a part of a packed weight."""
    if info.name.endswith(".weight_packed") or (info.dtype == "U8" and info.name.endswith(".weight")):
        return True
    base = _SCALE.sub("", info.name)
    if base == info.name:
        return False
    owner = checkpoint.tensors.get(base)
    if base.endswith(".weight"):  # scales of fp8 and int8 weights are another quantization's
        return owner is None or owner.dtype in (*FLOAT_DTYPES, "U8")
    return info.dtype in ("U8", "F8_E4M3") and (owner is None or owner.dtype == "U8")


def _native(checkpoint: Checkpoint, config: dict[str, Any]) -> Layout:
    table = native.parse_config(config)
    layout = Layout(native.QUANT_METHOD)
    found = []
    for name in checkpoint.tensors:
        entry = table.match_tensor(name)
        if entry is not None:
            found.append(entry.name)
            layout.weights.append(_of_entry(entry))
    layout.unmatched = table.unmatched(found)
    return layout


def _of_entry(entry: native.ModuleEntry) -> PackedWeight:
    scheme, name = entry.scheme, entry.tensor
    parts = {
        "packed": Part(name, "U8", (entry.stored_shape,)),
        "scale": Part(f"{name}_scale", DTYPE_NAMES[scale_dtype(scheme.scale_format)], (entry.scale_shape,)),
    }
    if scheme.global_scale:
        parts["global_scale"] = Part(f"{name}_global_scale", "F32", (entry.global_scale_shape,))
    return PackedWeight(name, scheme, entry.shape, parts, entry.experts, entry.transposed)


def _compressed_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> Layout:
    groups = list((config.get("config_groups") or {}).values())
    ignore = [str(name) for name in config.get("ignore") or ()]
    layout = Layout(compressed_tensors.QUANT_METHOD)
    layout.must_be_dense = lambda module: _named(module, ignore)
    layout.must_be_packed = lambda module: not _named(module, ignore) and _group_of(module, groups) is not None
    for info in checkpoint.tensors.values():
        module = info.name.removesuffix(".weight_packed")
        if module != info.name and (group := _group_of(module, groups)) is not None:
            scheme = _scheme_of_group(group, config)
            divisor = "weight_global_scale" if scheme.global_scale else None
            layout.weights.append(_weight(f"{module}.weight", info, scheme, f"{module}.weight_scale", divisor))
    layout.stale = _unused(ignore, checkpoint, known=("lm_head",))
    return layout


def _scheme_of_group(group: dict[str, Any], config: dict[str, Any]) -> QuantScheme:
    name = group.get("format") or config.get("format")
    if name not in compressed_tensors.SCHEMES:
        known = ", ".join(compressed_tensors.SCHEMES)
        raise UnknownFormatError(f"compressed-tensors format {name} is not known here; only {known}")
    size = (group.get("weights") or {}).get("group_size")
    scheme = compressed_tensors.SCHEMES[name]
    return QuantScheme.preset(scheme.name, block=size) if isinstance(size, int) else scheme


def _group_of(module: str, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The group that targets a linear layer: by class, by name or by pattern."""
    for group in groups:
        targets = [str(t) for t in group.get("targets") or ()]
        if "Linear" in targets or _named(module, targets):
            return group
    return None


def _named(module: str, names: list[str]) -> bool:
    """Whether a list in compressed-tensors' manner (``re:`` starts a pattern) names a module."""
    return any(re.match(n[3:], module) if n.startswith("re:") else n == module for n in names)


def _unused(names: list[str], checkpoint: Checkpoint, known: tuple[str, ...]) -> list[str]:
    """Names, patterns aside, of modules that the files do not hold."""
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
    return [n for n in names if not re.search(r"^re:|[*?\[]", n) and n not in known and n not in modules]


def _modelopt(checkpoint: Checkpoint, config: dict[str, Any]) -> Layout:
    algorithm = str(config.get("quant_algo"))
    if "NVFP4" not in algorithm and algorithm != "MIXED_PRECISION":
        raise UnknownFormatError(f"ModelOpt's {algorithm} is not known here; only NVFP4")
    scheme = QuantScheme.preset("nvfp4", block=int(config.get("group_size") or 16))
    excluded = [str(n) for n in (config.get("exclude_modules") or config.get("ignore") or ())]
    layout = Layout(MODELOPT)
    layout.must_be_dense = lambda module: any(fnmatch(module, n) for n in excluded)
    if algorithm != "MIXED_PRECISION":
        layout.must_be_packed = lambda module: not layout.must_be_dense(module)
    for info in checkpoint.tensors.values():
        if info.dtype == "U8" and info.name.endswith(".weight"):
            scale = f"{info.name}_scale"
            layout.weights.append(_weight(info.name, info, scheme, scale, "weight_scale_2", multiplied=True))
    return layout


def _quark(checkpoint: Checkpoint, config: dict[str, Any]) -> Layout:
    said = (config.get("global_quant_config") or {}).get("weight") or {}
    scale = _QUARK_SCALES.get(str(said.get("scale_format")))
    if not isinstance(said, dict) or said.get("dtype") != "fp4" or scale is None:
        raise UnknownFormatError(f"Quark's weights of {said.get('dtype')} are not known here; only fp4")
    scheme = QuantScheme(scale=scale, block=int(said.get("group_size") or 32))
    excluded = [str(n) for n in config.get("exclude") or ()]
    layout = Layout(QUARK)
    layout.must_be_dense = lambda module: _named(module, excluded) or any(fnmatch(module, n) for n in excluded)
    layout.must_be_packed = lambda module: not layout.must_be_dense(module)
    for info in checkpoint.tensors.values():
        if info.dtype == "U8" and info.name.endswith(".weight"):
            layout.weights.append(_weight(info.name, info, scheme, f"{info.name}_scale", None))
    return layout


def _weight(
    name: str, info: TensorInfo, scheme: QuantScheme, scale: str, global_scale: str | None, multiplied: bool = False
) -> PackedWeight:
    """A weight whose shape is that of its packed tensor ``[out, in/2]``, or ``[experts, out, in/2]``."""
    if len(info.shape) not in (2, 3):
        raise CheckpointError(f"{info.name} {list(info.shape)} is not a packed matrix")
    *stack, rows, row_bytes = info.shape
    shape, experts = (rows, 2 * row_bytes), stack[0] if stack else None
    kind = DTYPE_NAMES[scale_dtype(scheme.scale_format)]
    parts = {
        "packed": Part(info.name, "U8", (info.shape,)),
        "scale": Part(scale, kind, ((*stack, *scheme.scale_shape(shape)),)),
    }
    if global_scale is not None:
        one = ((*stack,), (*stack, 1)) if stack else ((), (1,))
        parts["global_scale"] = Part(f"{name.removesuffix('.weight')}.{global_scale}", "F32", one)
    return PackedWeight(name, scheme, shape, parts, experts, multiplied=multiplied)


def _gpt_oss(checkpoint: Checkpoint, config: dict[str, Any]) -> Layout:
    layout = Layout(GPT_OSS)
    kept = [str(n) for n in config.get("modules_to_not_convert") or ()]
    layout.must_be_dense = lambda module: any(_names_part(module, n) for n in kept)
    scheme = QuantScheme.preset("mxfp4")
    for info in checkpoint.tensors.values():
        name = info.name.removesuffix("_blocks")
        if name == info.name:
            continue
        if len(info.shape) != 4:
            raise CheckpointError(f"{info.name} {list(info.shape)} is not [experts, out, blocks, 16]")
        experts, rows, count, half = info.shape
        shape = (rows, count * half * 2)
        parts = {
            "packed": Part(info.name, "U8", ((experts, rows, count, 16),)),
            "scale": Part(f"{name}_scales", "U8", ((experts, rows, count),)),
        }
        layout.weights.append(PackedWeight(name, scheme, shape, parts, experts, transposed=True))
    return layout


def _names_part(module: str, name: str) -> bool:
    """Whether ``name`` is the module or one that holds it; ``*`` stands for anything."""
    return fnmatch(module, name) or fnmatch(module, f"{name}.*") or module.endswith(f".{name}")


_FINDERS: dict[str, Callable[[Checkpoint, dict[str, Any]], Layout]] = {
    native.QUANT_METHOD: _native,
    compressed_tensors.QUANT_METHOD: _compressed_tensors,
    MODELOPT: _modelopt,
    QUARK: _quark,
    GPT_OSS: _gpt_oss,
}
