"""What becomes of each tensor of a checkpoint, and every problem with that."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.checkpoint.layout import FLOAT_DTYPES
from mxquant.checkpoint.reader import Checkpoint, TensorInfo
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import PlanError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.architectures import NameMapper, Parameter, inventory
from mxquant.transformers.fused import fused_groups
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Layout, Piece, Place, layout, problems_of
from mxquant.transformers.select import Kept, dense_by_accident, pattern_problems, select

_OF_NO_PARAMETER = "not a parameter of the model class, or only a part of one"


@dataclass
class Decided:
    """``tensors``: what becomes of each, in file order; ``tied``: parameters without a tensor of their own."""

    tensors: list[TensorPlan]
    tied: dict[str, str]
    mapper: NameMapper

    def linear_schemes(self) -> dict[str, QuantScheme | None]:
        """The scheme of each matrix of the files that an engine loads as a linear layer, None for dense."""
        return {t.module: t.scheme for t in self.tensors if _is_layer(t)}


def decide(
    checkpoint: Checkpoint,
    recipe: QuantRecipe,
    model: Any,
    handled: Collection[str] = (),
    *,
    allow_dense: bool = False,
) -> Decided:
    """Decide on every tensor. ``handled``: parameters that the model itself changes or reads as it runs.

    Raises ``PlanError`` with all problems found.
    """
    parameters = {p.name: p for p in inventory(model, handled)}
    mapper = NameMapper(model)
    twice = _stored_twice(checkpoint, parameters, mapper)
    tensors, problems = _decide(checkpoint, recipe, parameters, mapper)
    tensors = [t for t in tensors if t.name not in twice]
    missing = list(mapper.missing(checkpoint.tensors, parameters.values()))
    if missing:
        problems.append(_lacks(checkpoint, missing, tensors, type(model).__name__))
    if not problems:
        problems += _check_coverage(tensors, recipe, allow_dense)
    if problems:
        raise PlanError(problems)
    present = {mapper(name) for name in checkpoint.tensors if name not in twice}
    return Decided(tensors, _tied(parameters, present), mapper)


def _tied(parameters: dict[str, Parameter], present: Collection[str | None]) -> dict[str, str]:
    """Parameters without a tensor of their own, and the one that each shares."""
    groups: dict[str, list[str]] = defaultdict(list)
    for p in parameters.values():
        groups[p.tied_to or p.name].append(p.name)
    tied: dict[str, str] = {}
    for source, names in groups.items():
        holder = source if source in present else next((n for n in names if n in present), source)
        tied |= {name: holder for name in names if name not in present and name != holder}
    return tied


def _lacks(checkpoint: Checkpoint, missing: list[str], tensors: list[TensorPlan], model: str) -> str:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    other = next((f"; it holds {t.name}, which {model} does not know" for t in tensors if t.kind is Kind.UNKNOWN), "")
    return f"{checkpoint.folder} lacks {', '.join(missing[:3])}{more}, which {model} needs{other}"


def _stored_twice(checkpoint: Checkpoint, parameters: dict[str, Parameter], mapper: NameMapper) -> set[str]:
    """Tensors that the model ties to another one which the files hold as well, with the same bytes.

    They are written once. Layers with other bytes are layers of their own, in ``parameters`` too: the
    loader will not tie them.
    """
    names = {mapper(name): name for name in checkpoint.tensors}
    found = set()
    for target, name in names.items():
        parameter = parameters.get(target or "")
        twin = names.get(parameter.tied_to) if parameter and parameter.tied_to else None
        if parameter is None or twin is None:
            continue
        if checkpoint.tensors[name].shape == checkpoint.tensors[twin].shape:
            one, other = checkpoint.read(name), checkpoint.read(twin)
            if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                found.add(name)
                continue
        if parameter.kind is Kind.LINEAR:
            parameters[parameter.name] = replace(parameter, tied_to=None)
    return found


def _decide(
    checkpoint: Checkpoint, recipe: QuantRecipe, parameters: dict[str, Parameter], mapper: NameMapper
) -> tuple[list[TensorPlan], list[str]]:
    tensors: list[TensorPlan] = []
    problems: list[str] = []
    misfits: list[str] = []
    weights: dict[str, Parameter] = {
        p.module: p for p in parameters.values() if p.tied_to and p.name.endswith(".weight")
    }
    strangers: list[str] = []  # modules of the files alone, such as layers that predict several tokens
    for info in checkpoint.tensors.values():
        place = mapper.place(info.name)
        parameter = parameters.get(place.parameter) if place else None
        if place and parameter and parameter.kind is Kind.EXPERTS:
            t = _experts_plan(info, place, parameter, recipe, problems)
            weights[t.module] = parameter
            tensors.append(t)
            continue
        if place and place.is_whole and not parameter:
            tensors.append(TensorPlan(info.name, info.dtype, info.shape, Kind.BUFFER, None, "buffer"))
            continue
        if not (place and parameter and place.is_whole):
            t = TensorPlan(info.name, info.dtype, info.shape, Kind.UNKNOWN, None, _OF_NO_PARAMETER)
            if place is None and mapper.ignores(info.name):
                t.kind, t.reason = Kind.IGNORED, "ignored by the model class"
            elif parameter and parameter.kind.expected:
                t.kind, t.reason = parameter.kind, f"part of {parameter.name} ({parameter.kind})"
            strangers.append(t.module)
            tensors.append(t)
            continue
        stored = parameter.shape[::-1] if parameter.transposed else parameter.shape
        if info.shape != stored:
            misfits.append(f"{info.name}: {list(info.shape)} in the file, but the config says {list(stored)}")
            continue
        t = TensorPlan(info.name, info.dtype, info.shape, parameter.kind, None, "", parameter.transposed)
        if info.name.endswith(".weight"):
            weights[t.module] = parameter
            t.scheme, t.reason, _ = select(parameter, t.module, recipe)
        else:
            t.reason = parameter.reason or str(parameter.kind)
        problems += _dtype_problems(t)
        tensors.append(t)
    if misfits:  # of a config that is another model's there are hundreds
        problems.append(misfits[0] + (f" (and {len(misfits) - 1} more like it)" if len(misfits) > 1 else ""))
    _group(tensors)
    problems += pattern_problems(recipe, weights, strangers)
    return tensors, problems + _check_experts(tensors, parameters)


def _group(tensors: list[TensorPlan]) -> None:
    """Have the layers that engines fuse share their global scale."""
    groups = fused_groups(t.module for t in tensors if _is_layer(t))
    for t in tensors:
        if t.group is None and t.scheme and t.scheme.global_scale:
            t.group = groups.get(t.module)


def _is_layer(t: TensorPlan) -> bool:
    return t.name.endswith(".weight") and len(t.shape) == 2 and t.kind is not Kind.EMBEDDING


def _dtype_problems(t: TensorPlan) -> list[str]:
    if not t.scheme or t.dtype in FLOAT_DTYPES:
        return []
    return [f"{t.name}: {t.dtype} weights cannot be quantized; need {', '.join(FLOAT_DTYPES)}"]


def _experts_plan(
    info: TensorInfo, place: Place, parameter: Parameter, recipe: QuantRecipe, problems: list[str]
) -> TensorPlan:
    """What becomes of a tensor with matrices of experts: of one, of all, or a part of all."""
    t = TensorPlan(info.name, info.dtype, info.shape, parameter.kind, None, "", place=place)
    found = layout(place, _three(parameter.shape), parameter.transposed, info.shape)
    if not isinstance(found, Layout):
        t.reason = found
        return t
    if info.shape != found.shape:
        problems.append(f"{info.name}: {list(info.shape)} in the file, but the config says {list(found.shape)}")
        return t
    t.scheme, t.reason, _ = select(parameter, t.module, recipe)
    t.transposed, t.experts = found.transposed, found.experts
    problems += _dtype_problems(t)
    if t.scheme and t.scheme.global_scale and place.parts > 1:
        t.group = place.parameter if place.expert is None else f"{place.parameter}.{place.expert}"
    return t


def _check_experts(tensors: list[TensorPlan], parameters: dict[str, Parameter]) -> list[str]:
    """Problems with the tensors that make up parameters of experts."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for t in tensors:
        if t.place and t.place.obstacle is None and len(t.shape) >= 2:
            held = Layout(t.matrix, t.experts, t.transposed)
            pieces[t.place.parameter].append(Piece(t.name, t.place, held, t.scheme))
    problems: dict[str, list[str]] = defaultdict(list)
    for name, found in pieces.items():
        for problem in problems_of(name, parameters[name].shape[0], found):
            problems[with_wildcards(name)].append(problem)
    # Layers are mostly alike, and so are their problems.
    return [f"{p[0]}{f' (and {len(p) - 1} more like it)' if len(p) > 1 else ''}" for p in problems.values()]


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    experts, rows, columns = shape
    return experts, rows, columns


def _check_coverage(tensors: list[TensorPlan], recipe: QuantRecipe, allow_dense: bool) -> list[str]:
    """Problems with what stays dense: nothing may be left out silently."""
    if not any(t.scheme for t in tensors):
        return ["nothing would be quantized: no linear layer is matched by the recipe"]
    matrices = [t for t in tensors if len(t.shape) >= 2 and not t.kind.expected]
    kept = [Kept(t.name, t.parameters, t.reason) for t in matrices if not t.scheme and not _kept_by_rule(t, recipe)]
    accident = None if allow_dense else dense_by_accident(kept, sum(t.parameters for t in matrices))
    if accident is None:
        return []
    return [
        f"{accident.share:.0%} of the weights in matrices would stay dense without a rule saying so, e.g. "
        f"{accident.largest.name} ({accident.largest.reason}); exclude them, or pass --allow-dense"
    ]


def _kept_by_rule(t: TensorPlan, recipe: QuantRecipe) -> bool:
    """Whether somebody said that a tensor stays dense.

    An ``include`` that leaves out what is no linear layer of the model does not say so of that.
    """
    decision = recipe.decide(t.module)
    return decision.named and (t.kind.quantized or any(re.search(p, t.module) for p in recipe.dense_patterns))
