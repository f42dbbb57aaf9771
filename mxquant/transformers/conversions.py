"""How the loader of transformers brings packed experts into place, and takes them apart again when saving.

Its rules for an architecture say how tensors of the files are renamed, stacked and concatenated to
the parameters of experts. Packed rows can be stacked and concatenated like dense ones, so the rules
stay, each with copies of it for the two kinds of scales.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from mxquant.checkpoint.formats import native
from mxquant.checkpoint.formats.base import PackedFormat
from mxquant.transformers.matching import SCALES

# Some versions let a pattern match the start of a longer name: `weight` would take `weight_scale`, too.
_END = r"(?!\w)"

Tensors = dict[str, Any]


def for_packed(conversions: Iterable[Any], experts: Iterable[str], tensors: Iterable[str]) -> list[Any]:
    """The loader's rules, for a model of which the parameters ``experts`` are packed.

    ``tensors``: dense names of the packed tensors in the files, whose scales follow them.
    """
    experts = list(experts)
    renamed = _renamings_of_leaves([c for c in conversions if isinstance(c, WeightRenaming)], tensors)
    found: list[Any] = []
    for c in conversions:
        if feeds(c, experts):
            found += _packed_converters(c)
            continue
        found.append(c)
        if c in renamed:
            found += [like(c, WeightRenaming, suffix) for suffix in SCALES]
    return found


def from_files(format: PackedFormat) -> list[Any]:
    """Rules that give tensors of files in another format the names, and where need be the bits, that they have in
    a model."""
    rules: list[Any] = []
    for role, suffix in format.suffixes.items():
        source, target = f"weight{suffix}", f"weight{native.FORMAT.suffixes[role]}"
        if role in format.converts:
            rules.append(WeightConverter([source + _END], [target], operations=[Converted(format, role)]))
        elif source != target:
            rules.append(WeightRenaming(source, target))
    return rules


def feeds(conversion: Any, experts: Iterable[str]) -> bool:
    """Whether a rule makes one of the parameters ``experts`` out of others."""
    is_converter = isinstance(conversion, WeightConverter) and len(conversion.target_patterns) == 1
    return is_converter and any(conversion.target_patterns[0] in name for name in experts)


def merges(converter: WeightConverter) -> bool:
    """Whether a rule stacks and concatenates, rather than changing the one tensor that it takes."""
    return all(isinstance(o, MergeModulelist | Concatenate) for o in converter.operations)


def _packed_converters(c: WeightConverter) -> list[Any]:
    if not merges(c):
        kept = like(c, WeightConverter, operations=[UnlessPacked(o) for o in c.operations])
        return [kept, *(like(c, WeightRenaming, suffix) for suffix in SCALES)]
    operations: dict[str, ConversionOps] = {
        "": JoinExperts(),
        "_scale": JoinExperts(),
        "_global_scale": JoinGlobalScales(),
    }
    return [like(c, WeightConverter, suffix, operations=[o]) for suffix, o in operations.items()]


def like(c: Any, kind: Any, suffix: str = "", **options: Any) -> Any:
    """A rule of class ``kind`` like ``c``, for names that are longer by ``suffix`` and no other."""
    patterns = (c._original_source_patterns, c._original_target_patterns)
    sources, targets = ([p + suffix + _END for p in one] for one in patterns)
    made = kind(source_patterns=sources, target_patterns=targets, **options)
    made.scope_prefix, made.base_model_prefix = c.scope_prefix, c.base_model_prefix
    return made


def _renamings_of_leaves(renamings: Sequence[Any], tensors: Iterable[str]) -> list[Any]:
    """Rules that rename the end of one of ``tensors``, so that the longer names of its scales may escape them."""
    found: list[Any] = []
    probes = copy.deepcopy(list(renamings))  # a rule remembers that it was used
    for name in tensors:
        for original, probe in zip(renamings, probes, strict=True):
            match = probe._scoped_match(name) if type(probe) is WeightRenaming else None
            if match and match[2].end() == len(match[1]) and original not in found:
                found.append(original)
            name, _ = probe.rename_source_key(name)
    return found


class JoinExperts(ConversionOps):
    """Tensors of each expert, or of all, to one: stacked by expert and concatenated along the rows."""

    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        parts = [_stacked(input_dict.pop(pattern), pattern) for pattern in source_patterns]
        return {target_patterns[0]: parts[0] if len(parts) == 1 else torch.cat(parts, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitExperts()


class SplitExperts(ConversionOps):
    """Inverse of :class:`JoinExperts`."""

    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        (tensor,) = (_single(value) for value in input_dict.values())
        parts = tensor.chunk(len(target_patterns), 1)
        return {k: v for pattern, part in zip(target_patterns, parts, strict=True) for k, v in _each(pattern, part)}

    @property
    def reverse_op(self) -> ConversionOps:
        return JoinExperts()


class JoinGlobalScales(ConversionOps):
    """Global scales of each expert's matrices to ``[experts]``; those of one expert must be equal."""

    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        parts = [_stacked(input_dict.pop(pattern), pattern).reshape(-1) for pattern in source_patterns]
        if parts[0].device.type != "meta" and any(not torch.equal(part, parts[0]) for part in parts):
            raise ValueError(f"matrices of one expert have different global scales ({', '.join(source_patterns)})")
        return {target_patterns[0]: parts[0]}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitGlobalScales()


class SplitGlobalScales(ConversionOps):
    """Inverse of :class:`JoinGlobalScales`."""

    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        (tensor,) = (_single(value) for value in input_dict.values())
        # Two tensors of a file must not share memory.
        parts = [(p, tensor[:, None].clone() if "*" in p else tensor.clone()) for p in target_patterns]
        return {k: v for pattern, part in parts for k, v in _each(pattern, part)}

    @property
    def reverse_op(self) -> ConversionOps:
        return JoinGlobalScales()


class Converted(ConversionOps):
    """A tensor of a packed weight in the files of ``format``, with its bits where the model has them."""

    def __init__(self, format: PackedFormat, role: str):
        self.format, self.role = format, role

    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        (tensor,) = (_single(value) for value in input_dict.values())
        return {target_patterns[0]: self.format.convert(self.role, tensor)}


class UnlessPacked(ConversionOps):
    """An operation of transformers on dense weights, that leaves packed ones as they are."""

    def __init__(self, operation: ConversionOps):
        self.operation = operation

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Tensors:
        (tensor,) = (_single(value) for value in input_dict.values())
        module, _, name = kwargs["full_layer_name"].rpartition(".")
        model = kwargs.get("model")
        if tensor.dtype == torch.uint8 or (model is not None and name in _buffers(model, module)):
            return {target_patterns[0]: tensor}
        return self.operation.convert(input_dict, source_patterns, target_patterns, **kwargs)

    @property
    def reverse_op(self) -> ConversionOps:
        return UnlessPacked(self.operation.reverse_op)


def _stacked(value: Any, pattern: str) -> torch.Tensor:
    """What the loader collected for a pattern: a tensor of each expert, or one of all."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.stack(value) if "*" in pattern else value[0]


def _single(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def _each(pattern: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a pattern stands for, by name."""
    if "*" not in pattern:
        return [(pattern, tensor.contiguous())]
    return [(pattern.replace("*", str(expert)), part) for expert, part in enumerate(tensor)]


def _buffers(model: Any, module: str) -> Any:
    return model.get_submodule(module)._buffers
