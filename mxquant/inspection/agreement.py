"""Whether config, tensors and the model's class agree, in both directions; tied weights; fused projections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.reader import Checkpoint
from mxquant.errors import MXQuantError
from mxquant.inspection.faults import Verification
from mxquant.transformers.architectures import NameMapper, Parameter, build_meta_model, inventory
from mxquant.transformers.fused import fused_groups
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Place
from mxquant.transformers.mixtures import layout as layout_of_experts


def check_config(checkpoint: Checkpoint, layout: Layout, found: Verification) -> list[PackedWeight]:
    """Faults between config and tensors; returns the weights whose tensors are all there and as they should be."""
    for pattern in layout.unmatched:
        found.add("config", f"the config lists {pattern}, and the files hold no such packed weight")
    for name in layout.unlisted:
        found.add("config", f"{name} is a part of a packed weight that the config does not list")
    if layout.method is not None and not layout.weights:
        found.add("config", f"the config says {layout.method}, and no tensor is packed")
    whole = []
    for weight in layout.weights:
        if layout.must_be_dense(weight.module):
            found.add("config", f"{weight.name} is packed, and the config says that it is dense")
        problems = weight.problems(checkpoint.tensors)
        for kind, message in problems:
            found.add("config" if kind == "missing" else kind, message)
        if not problems:
            whole.append(weight)
    found.checked["packed weights"] = len(layout.weights)
    return whole


@dataclass
class Model:
    """The model's class, without weights: what each tensor of the files is in it."""

    name: str
    built: Any
    parameters: dict[str, Parameter]
    mapper: NameMapper

    @classmethod
    def of(cls, checkpoint: Checkpoint, found: Verification, *, trust_remote_code: bool = False) -> Model | None:
        """None, with a warning, where transformers does not know the architecture."""
        try:
            model = build_meta_model(checkpoint.folder, trust_remote_code=trust_remote_code)
        except MXQuantError as error:
            found.warnings.append(f"not compared with the model's class: {error}")
            return None
        return cls(type(model).__name__, model, {p.name: p for p in inventory(model)}, NameMapper(model))

    def experts_group(self, weight: PackedWeight) -> str | None:
        """A name shared by the matrices of one expert; None for other weights."""
        place = self.mapper.place(weight.name)
        parameter = self.parameters.get(place.parameter) if place is not None else None
        if place is None or parameter is None or parameter.kind is not Kind.EXPERTS or place.parts == 1:
            return None
        return f"{place.parameter} {place.expert}"

    def shape(self, place: Place, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape that a dense tensor must have at its place; None where that cannot be said."""
        parameter = self.parameters.get(place.parameter)
        if parameter is None:
            return None
        if parameter.kind is Kind.EXPERTS:
            experts, rows, columns = parameter.shape
            known = layout_of_experts(place, (experts, rows, columns), parameter.transposed, stored)
            return None if isinstance(known, str) else known.shape
        if not place.is_whole:
            return None
        return parameter.shape[::-1] if parameter.transposed else parameter.shape


def check_model(checkpoint: Checkpoint, layout: Layout, model: Model, found: Verification) -> None:
    """Faults between the tensors and the model's class: what it lacks, shapes, layers dense against the config."""
    parts = layout.part_names
    dense = [t for t in checkpoint.tensors.values() if t.name not in parts]
    shapes = {t.name: t.shape for t in dense} | {w.name: w.dense_shape for w in layout.weights}
    for name in model.mapper.missing(shapes, model.parameters.values()):
        found.add("config", f"no tensor fills {name}, which {model.name} needs")
    packed = {w.name for w in layout.weights}
    extra = {*layout.unlisted, *layout.activation_scales}
    for name, shape in shapes.items():
        place = model.mapper.place(name)
        if place is None:
            if name in packed and not model.mapper.ignores(name):
                found.add("config", f"{name} is packed, and {model.name} has no such weight")
            elif name not in extra:
                found.warnings.append(f"{name} is no parameter of {model.name}; loaders ignore it")
            continue
        wanted = model.shape(place, shape)
        if wanted is not None and shape != wanted:
            found.add("shapes", f"{name} is {list(shape)}, and {model.name} needs {list(wanted)}")
    found.checked["model class"] = model.name


def check_tied(checkpoint: Checkpoint, layout: Layout, model: Model, found: Verification) -> None:
    """Faults of weights that the config ties: the files hold one of them, once and dense."""
    parts = layout.part_names
    holders: dict[str, str] = {}
    for name in [*(n for n in checkpoint.tensors if n not in parts), *(w.name for w in layout.weights)]:
        target = model.mapper(name)
        if target is not None:
            holders[target] = name
    count = 0
    for parameter in model.parameters.values():
        source = parameter.tied_to
        if source is None:
            continue
        count += 1
        twin, other = holders.get(parameter.name), holders.get(source)
        if twin is not None and other is not None:
            same = twin in checkpoint.tensors and other in checkpoint.tensors and _equal(checkpoint, twin, other)
            how = "is stored a second time" if same else "is stored beside it, and differs"
            found.add("tied", f"{twin} is tied to {other}, but {how}")
    found.checked["tied weights"] = count


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    a, b = checkpoint.read(name), checkpoint.read(other)
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def groups(weights: Iterable[PackedWeight], model: Model | None) -> list[list[PackedWeight]]:
    """The weights with global scales, those together that must have the same."""
    found: dict[str, list[PackedWeight]] = defaultdict(list)
    scaled = [weight for weight in weights if "global_scale" in weight.parts]
    fused = fused_groups(weight.module for weight in scaled)
    for weight in scaled:
        group = None if model is None else model.experts_group(weight)
        found[group or fused.get(weight.module, weight.name)].append(weight)
    return list(found.values())


def check_groups(
    checkpoint: Checkpoint, weights: Iterable[PackedWeight], model: Model | None, found: Verification
) -> None:
    """Faults of projections that engines fuse: their matrices must have one global scale."""
    several = [members for members in groups(weights, model) if len(members) > 1]
    for members in several:
        values = [_global_scales(checkpoint, w) for w in members]
        if any(v != values[0] for v in values):
            shown = ", ".join(f"{w.module} {_short(v)}" for w, v in zip(members, values, strict=True))
            found.add("groups", f"engines fuse these and take one global scale for all: {shown}")
    found.checked["fused groups"] = len(several)


def _global_scales(checkpoint: Checkpoint, weight: PackedWeight) -> list[float]:
    return [float(x) for x in checkpoint.read(weight.parts["global_scale"].name).reshape(-1)]


def _short(values: list[float]) -> str:
    text = ", ".join(f"{v:.9g}" for v in values[:2])
    return text if len(values) == 1 else f"[{text}, ...]"
