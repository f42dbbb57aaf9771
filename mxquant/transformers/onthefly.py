"""Quantizing a dense checkpoint while transformers loads it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from mxquant.checkpoint.formats.native import ModuleEntry, compact_names, name_regex
from mxquant.checkpoint.headers import Tensors
from mxquant.checkpoint.pytorch import read_file
from mxquant.codec.amax import group_amax, tensor_amax
from mxquant.codec.scaling import global_scale_for
from mxquant.errors import SchemeError
from mxquant.ops.operators import quantize
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.architectures import NameMapper, Parameter, inventory
from mxquant.transformers.behaviour import watch
from mxquant.transformers.conversions import JoinExperts, UnlessPacked, feeds, like, merges
from mxquant.transformers.fused import fused_groups
from mxquant.transformers.kinds import Kind
from mxquant.transformers.matching import Packed
from mxquant.transformers.mixtures import Layout, Piece, Place, entry_of, layout, problems_of
from mxquant.transformers.parts import is_plain_linear
from mxquant.transformers.select import pattern_problems, select


def choose(model: nn.Module, recipe: QuantRecipe, headers: Tensors | None) -> Packed:
    """What to quantize, under the names of the checkpoint.

    ``headers``: those of the checkpoint; None if there are no files, so that its names are taken to be
    the model's. Output heads and tied weights stay dense unless a rule names them, as in
    :func:`mxquant.quantize_model`. Raises ``SchemeError`` for patterns that match nothing, if
    nothing would be quantized, and for experts that cannot share a format as asked.
    """
    everything = inventory(model, watch(model).written)
    parameters = [p for p in everything if p.name.endswith(".weight")]
    experts = {p.name: p for p in everything if p.kind is Kind.EXPERTS}
    places = _places(model, headers, [*(p.name for p in parameters), *experts])
    names = {place.parameter: key for key, place in places.items() if place.is_whole}
    # Layers that the files hold twice are layers of their own.
    parameters = [replace(p, tied_to=None) if _held_twice(p, names) else p for p in parameters]
    packed = Packed()
    routers = {p.module for p in parameters if p.kind is Kind.ROUTER}
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in routers]
    skipped = [n for n, m in linear if not is_plain_linear(m)]
    weights: dict[str, Parameter] = {}
    for p in parameters:
        name = names.get(p.name, p.name).removesuffix(".weight")
        weights[name] = p
        scheme = select(p, name, recipe).scheme
        if scheme is None:
            continue
        if p.name not in names:
            skipped.append(p.module)
            continue
        activations = recipe.activations_for(scheme)
        packed.modules[p.module] = ModuleEntry(name, scheme, (p.shape[0], p.shape[1]), p.transposed, activations)
        packed.tensors[f"{name}.weight"] = p.name
    for name, parameter in experts.items():
        held = {key: place for key, place in places.items() if place.parameter == name}
        weights |= {key.removesuffix(".weight"): parameter for key in held}
        pieces = _pieces(held, parameter, headers, recipe)
        if any(p.scheme for p in pieces):
            _check(problems_of(name, parameter.shape[0], pieces))
            packed.experts[name] = entry_of(pieces, parameter.shape[0])
            packed.tensors |= dict.fromkeys(held, name)
        elif len(pieces) < len(held):
            skipped.append(name)
    others = {key.rpartition(".")[0] for key in headers or ()} - {key.rpartition(".")[0] for key in places}
    _check(pattern_problems(recipe, weights, others))
    if not packed.tensors:
        raise SchemeError(f"nothing of {type(model).__name__} would be quantized: no linear layer is matched")
    if skipped:
        warnings.warn(
            f"{len(skipped)} layers stay dense, because they compute more than a linear map, or because transformers "
            f"assembles their weights from several tensors: {', '.join(skipped[:3])}",
            stacklevel=2,
        )
    return packed


def _places(model: nn.Module, headers: Tensors | None, parameters: Iterable[str]) -> dict[str, Place]:
    """Where each tensor of the checkpoint goes."""
    if headers is None:
        return {name: Place(name) for name in parameters}
    mapper = NameMapper(model)
    return {key: place for key in headers if (place := mapper.place(key)) is not None}


def _pieces(
    held: Mapping[str, Place], parameter: Parameter, headers: Tensors | None, recipe: QuantRecipe
) -> list[Piece]:
    """The tensors that make up a parameter of experts, with the schemes that they are to have."""
    experts, rows, columns = parameter.shape
    pieces = []
    for key, place in held.items():
        found = None if headers is None else headers[key].shape
        how = layout(place, (experts, rows, columns), parameter.transposed, found or ())
        if isinstance(how, Layout) and found in (None, how.shape):
            scheme = select(parameter, key.removesuffix(".weight"), recipe).scheme
            activations = recipe.activations_for(scheme) if scheme else None
            pieces.append(Piece(key, place, how, scheme, activations))
    return pieces


def _held_twice(parameter: Parameter, names: Collection[str]) -> bool:
    return parameter.kind is Kind.LINEAR and parameter.name in names and parameter.tied_to in names


def _check(problems: list[str]) -> None:
    if problems:
        raise SchemeError(problems[0])


def keep_source_precision(model: Any, packed: Packed) -> None:
    """Have the loader hand over the weights to be quantized in fp32, whatever the model's dtype.

    bf16 and fp16 sources lose nothing by it, and fp32 ones are not rounded twice; and loaders that
    would cast a weight to the dtype of its place, by now uint8, do not.
    """
    # A few patterns are searched faster than thousands of names.
    names = {*packed.tensors.values()}
    compact = compact_names(names, model.state_dict())
    patterns = [f"^{name_regex(name).pattern}$" for name in compact]
    plan = model._get_dtype_plan

    def with_weights(dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**dict.fromkeys(patterns, torch.float32), **plan(dtype)}

    model._get_dtype_plan = with_weights


def forget_source_precision(model: nn.Module) -> None:
    """Undo :func:`keep_source_precision`."""
    model.__dict__.pop("_get_dtype_plan", None)


def shared_global_scales(entries: Mapping[str, ModuleEntry], files: Iterable[str]) -> dict[str, torch.Tensor]:
    """Global scales (fp32 ``[1]``) of the projections that serving engines fuse, by runtime name.

    Each group has one, from the largest magnitude in any of its weights, so all have to be seen
    before the first is quantized: one more pass over the mapped files. Without files, each weight
    gets its own.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    fused = fused_groups(entry.name for entry in entries.values())
    for target, entry in entries.items():
        if entry.scheme.global_scale and entry.name in fused:
            groups[fused[entry.name]].append(target)
    wanted = {f"{entries[t].name}.weight": t for members in groups.values() for t in members}
    amax: dict[str, torch.Tensor] = {}
    for file in files:
        if file.endswith(".bin"):
            amax |= {wanted[k]: tensor_amax(t) for k, t in read_file(Path(file)).items() if k in wanted}
            continue
        with safe_open(file, framework="pt") as handle:
            for key in wanted.keys() & set(handle.keys()):
                amax[wanted[key]] = tensor_amax(handle.get_tensor(key))
    scales: dict[str, torch.Tensor] = {}
    for members in groups.values():
        found = [amax[t] for t in members if t in amax]
        if found:
            largest = torch.stack(found).amax()
            scales |= {t: global_scale_for(largest, entries[t].scheme) for t in members}
    return scales


class QuantizeOnLoad(ConversionOps):
    """Turns a weight that has just been read into the buffers of its ``QuantLinear`` or ``QuantExperts``.

    The bytes are those of ``mxquant.quantize(weight, scheme, seed=seed, name=<name in the checkpoint>,
    global_scale=<that of its group>)``, and so those of :func:`mxquant.quantize_model`.
    """

    def __init__(self, packed: Packed, seed: int, global_scales: Mapping[str, torch.Tensor]):
        self._packed = packed
        self._seed = seed
        self._global_scales = global_scales

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ((target, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        if target in self._packed.experts:
            entry = self._packed.experts[target]
            return quantize_experts(target, entry, [_matrices(entry.name, weight)], self._seed)
        module = target.removesuffix(".weight")
        entry, shared = self._packed.modules[module], self._global_scales.get(module)
        if entry.transposed:
            weight = weight.t()
        shared = None if shared is None else shared.to(weight.device)
        q = quantize(weight.contiguous(), entry.scheme, seed=self._seed, name=entry.tensor, global_scale=shared)
        made = {target: q.packed.view(entry.stored_shape), f"{target}_scale": q.scale}
        if q.global_scale is not None:
            made[f"{target}_global_scale"] = q.global_scale
        return made


def for_quantizing(conversions: Iterable[Any], experts: Mapping[str, ModuleEntry], seed: int) -> list[Any]:
    """The loader's rules, such that they quantize ``experts`` where they would stack their matrices."""
    found = []
    for c in conversions:
        if feeds(c, experts) and merges(c):
            quantizing = like(c, QuantizingConverter, operations=[JoinExperts()])
            quantizing.rule, quantizing.task = c, Task(experts, seed)
            found.append(quantizing)
        elif feeds(c, experts):
            found.append(like(c, type(c), operations=[UnlessPacked(o) for o in c.operations]))
        else:
            found.append(c)
    return found


def rules_of(conversions: Iterable[Any]) -> list[Any]:
    """The loader's rules again."""
    return [c.rule if isinstance(c, QuantizingConverter) else c for c in conversions]


@dataclass(frozen=True)
class Task:
    """What a :class:`QuantizingConverter` is to do."""

    experts: Mapping[str, ModuleEntry]
    seed: int

    def __deepcopy__(self, memo: Any) -> Task:
        return self  # the loader copies its rules for every tensor


class QuantizingConverter(WeightConverter):
    """Quantizes the matrices of experts one by one, where the loader would read and stack all of them first."""

    __slots__ = ("rule", "task")
    rule: WeightConverter
    task: Task

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        super().add_tensor(target_key, source_key, source_pattern, (source_key, future))  # type: ignore[arg-type]

    @torch.no_grad()
    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        collected: dict[str, list[Any]] = {p: list(self.collected_tensors.pop(p)) for p in self.source_patterns}
        entry = self.task.experts.get(layer_name)
        if entry is None:
            dense = {pattern: [_taken(future) for _, future in found] for pattern, found in collected.items()}
            joined = JoinExperts().convert(dense, self.source_patterns, self.target_patterns)
            return {layer_name: joined[self.target_patterns[0]]}
        parts: list[list[Matrix]] = []
        for pattern, found in collected.items():
            if "*" in pattern:
                parts.append([(name, partial(_taken, future)) for name, future in found])
            else:
                ((name, future),) = found
                parts.append(_matrices(name, _taken(future)))
        return quantize_experts(layer_name, entry, parts, self.task.seed)


# The name of a matrix, which seeds random bits, and what reads it.
Matrix = tuple[str, Callable[[], torch.Tensor]]


def quantize_experts(
    target: str, entry: ModuleEntry, parts: Sequence[Sequence[Matrix]], seed: int
) -> dict[str, torch.Tensor]:
    """The buffers of a packed parameter, by name. ``parts``: the matrices of all experts, for each part of its rows."""
    made: list[list[torch.Tensor]] = [[], [], []]
    for matrices in zip(*parts, strict=True):
        shared = None
        if entry.scheme.global_scale:
            shared = global_scale_for(group_amax(read() for _, read in matrices), entry.scheme)
        quantized = []
        for name, read in matrices:
            matrix = read().t() if entry.transposed else read()
            quantized.append(quantize(matrix.contiguous(), entry.scheme, seed=seed, name=name, global_scale=shared))
        made[0].append(torch.cat([q.packed for q in quantized]))
        made[1].append(torch.cat([q.scale for q in quantized]))
        if shared is not None:
            made[2].append(shared)
    packed, scale, divisors = made
    buffers = {target: torch.stack(packed).view(entry.stored_shape), f"{target}_scale": torch.stack(scale)}
    return {**buffers, f"{target}_global_scale": torch.cat(divisors)} if divisors else buffers


def _matrices(name: str, tensor: torch.Tensor) -> list[Matrix]:
    """The matrices of all experts in one tensor."""
    return [(f"{name}.{expert}", partial(_taken, matrix)) for expert, matrix in enumerate(tensor)]


def _taken(future: Any) -> torch.Tensor:
    """A tensor that the loader has put off reading, or not."""
    if isinstance(future, torch.Tensor):
        return future
    return future.result() if hasattr(future, "result") else future()
