"""Mixtures of experts: the modules that hold them, what routes to them, and how files spell their matrices.

transformers keeps the matrices of all experts of a layer in one parameter, ``[experts, out, in]`` or
``[experts, in, out]``. Files hold the same, or one matrix for each expert and projection, which the
loader stacks and concatenates; :class:`Place` says which of them a tensor is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mxquant.checkpoint.formats.native import ModuleEntry
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

_INTERFACE = ("is_transposed", "has_gate", "has_bias", "num_experts", "_apply_gate")
# Llama 4's experts came before the interface, and see every token: those not meant for them as zeros.
_ALL_TOKENS = "Llama4TextExperts"
_ROUTERS = {"router", "gate", "gating", "shared_expert_gate", "shared_experts_gate"}


def matrices(module: nn.Module) -> dict[str, bool]:
    """Parameters that hold the matrices of experts -> whether each matrix lies transposed, ``[in, out]``.

    Empty for modules that are no experts, or compute something else than a gated or plain MLP.
    """
    if takes_all_tokens(module):
        return {"gate_up_proj": True, "down_proj": True}
    # What the decorator `use_experts_implementation` leaves; a class that overrides its forward has no `__wrapped__`.
    if not all(hasattr(module, name) for name in _INTERFACE) or not hasattr(type(module).forward, "__wrapped__"):
        return {}
    experts: Any = module
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    tensors = [getattr(experts, name, None) for name in names]
    if any(t is None or t.ndim != 3 or t.shape[0] != experts.num_experts for t in tensors):
        return {}
    return dict.fromkeys(names, bool(experts.is_transposed))


def takes_all_tokens(module: nn.Module) -> bool:
    """Whether experts are given all tokens, ``[experts x tokens, hidden]``, zeros where they are not meant."""
    return type(module).__name__ == _ALL_TOKENS


def routers(model: nn.Module) -> set[str]:
    """Matrices that choose experts, or weigh what they return."""
    found = set()
    for path, module in model.named_modules():
        experts = [n for n, c in module.named_children() if matrices(c) or (n == "experts" and is_list(c))]
        if not experts:
            continue
        for name, parameter in module.named_parameters():
            *parents, _ = name.split(".")
            if parameter.ndim > 1 and parents and parents[0] not in experts and _ROUTERS & set(parents):
                found.add(f"{path}.{name}" if path else name)
    return found


def is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint goes: to a parameter of the model, as a whole or as one part of it.

    ``expert``: its number, where each expert has a tensor of its own. ``part`` of ``parts``: which
    rows, where several tensors are concatenated. ``swapped``: whether the loader exchanges the last
    two dimensions; None if it looks at the shape. ``obstacle``: the operations by which the loader
    makes the parameter, where packed weights could not go through them.
    """

    parameter: str
    expert: int | None = None
    part: int = 0
    parts: int = 1
    swapped: bool | None = False
    obstacle: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the parameter, and nothing is done to it."""
        return self.expert is None and self.parts == 1 and self.swapped is False and self.obstacle is None


def place_by(converter: Any, pattern: str, parameter: str, name: str) -> Place:
    """The place of the tensor ``name``, which a ``WeightConverter`` of transformers collects by one of its patterns."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    sources, operations = converter.source_patterns, converter.operations
    kinds = [type(o) for o in operations]
    part, parts = sources.index(pattern), len(sources)
    if len(converter.target_patterns) == 1:
        if kinds == [Transpose] and parts == 1 and {o % 3 for o in (operations[0].dim0, operations[0].dim1)} == {1, 2}:
            return Place(parameter, swapped=None if operations[0].check_dims else True)
        dims = [getattr(o, "dim", None) for o in operations]
        number = re.search(pattern.replace("*.", r"(\d+)\."), name) if pattern.count("*.") == 1 else None
        stacked = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
        if number and (stacked or (kinds == [MergeModulelist] and dims == [0] and parts == 1)):
            return Place(parameter, expert=int(number[1]), part=part, parts=parts)
        if kinds == [Concatenate] and dims == [1]:
            return Place(parameter, part=part, parts=parts)
    return Place(parameter, obstacle=" and ".join(k.__name__ for k in kinds))


@dataclass(frozen=True)
class Layout:
    """How one tensor of the files holds matrices ``(out_features, in_features)`` of a parameter of experts.

    ``experts``: how many it holds; None if it is a single one. ``transposed``: stored ``[in, out]``.
    """

    matrix: tuple[int, int]
    experts: int | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        matrix = self.matrix[::-1] if self.transposed else self.matrix
        return matrix if self.experts is None else (self.experts, *matrix)


def layout(place: Place, shape: tuple[int, ...], transposed: bool, found: Sequence[int]) -> Layout | str:
    """The layout of a tensor of shape ``found`` at ``place``, or the reason why it cannot be packed.

    ``shape``: ``(experts, out, in)`` of the parameter; ``transposed``: whether the model stores ``[experts, in, out]``.
    """
    experts, rows, columns = shape
    if place.obstacle:
        return f"experts that transformers assembles by {place.obstacle}, which packed weights cannot follow"
    if transposed and (place.expert is not None or place.parts > 1):
        return "experts that are joined along their input features, which would cut blocks"
    if rows % place.parts:
        return f"{place.parts} parts do not divide the {rows} rows of {place.parameter}"
    matrix = (rows // place.parts, columns)
    if place.expert is not None:
        return Layout(matrix, None, False)
    swapped = place.swapped
    if swapped is None:
        swapped = tuple(found) != Layout(matrix, experts, transposed).shape
    return Layout(matrix, experts, transposed != swapped)


@dataclass(frozen=True)
class Piece:
    """A tensor of the files that holds matrices of a parameter of experts; ``scheme`` None: dense."""

    name: str
    place: Place
    layout: Layout
    scheme: QuantScheme | None
    activations: ActivationScheme | None = None


def problems_of(parameter: str, experts: int, pieces: Sequence[Piece]) -> list[str]:
    """What keeps tensors from making up one packed parameter: all must be there, in one format, in whole blocks."""
    places = [p.place for p in pieces]
    parts = places[0].parts
    numbers: Sequence[int | None] = range(experts) if places[0].expert is not None else [None]
    wanted = {(number, part) for number in numbers for part in range(parts)}
    lost = wanted - {(p.expert, p.part) for p in places}
    if lost:
        return [f"{len(lost)} of the {len(wanted)} tensors that make up {parameter} are missing"]
    first = pieces[0]
    other = next((p for p in pieces if (p.scheme, p.activations) != (first.scheme, first.activations)), None)
    if other:
        return [
            f"the experts of {parameter} need one format, but {first.name} would be {_format(first)} and "
            f"{other.name} {_format(other)}: have one rule name them all"
        ]
    rows, scheme = first.layout.matrix[0], first.scheme
    if scheme and parts > 1 and rows % scheme.block_shape[0]:
        return [
            f"{first.name} has {rows} rows, and the model joins it with others to {parameter}: tiles "
            f"({scheme.block_text}) would lie across both; choose blocks of one row, or exclude the experts"
        ]
    return []


def entry_of(pieces: Sequence[Piece], experts: int) -> ModuleEntry:
    """The format of the parameter that packed tensors make up, under the name of the first of them."""
    first = pieces[0]
    assert first.scheme is not None
    rows, columns = first.layout.matrix
    shape = (rows * first.place.parts, columns)
    return ModuleEntry(first.name, first.scheme, shape, first.layout.transposed, first.activations, experts)


def _format(piece: Piece) -> str:
    return piece.scheme.text if piece.scheme else "dense"
