"""Who is quantized: what a recipe makes of the parameters of a model, for files and for models in memory alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.architectures import Parameter
from mxquant.transformers.fused import FUSED_LAYERS, fused_groups
from mxquant.transformers.kinds import Kind

# More of a model's weights than this may not stay dense by accident.
MAX_DENSE_SHARE = 0.05


class Choice(NamedTuple):
    """What becomes of a weight: its scheme, None for dense, and the reason. ``named``: a rule says so."""

    scheme: QuantScheme | None
    reason: str
    named: bool = False


class Kept(NamedTuple):
    """A matrix that stays dense, of so many numbers."""

    name: str
    size: int
    reason: str


def select(parameter: Parameter, module: str, recipe: QuantRecipe) -> Choice:
    """What a recipe makes of a weight. ``module``: its name in the files, as rules see it."""
    decision = recipe.decide(module)
    kind = parameter.kind
    if not kind.nameable or parameter.tied_to is not None or not (kind.quantized or decision.named):
        return Choice(None, parameter.reason or str(kind))
    return Choice(decision.scheme, decision.reason, decision.named)


def selected_by_default(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that are quantized where no rule says otherwise."""
    return [p for p in parameters if p.kind.quantized and p.tied_to is None]


def pattern_problems(recipe: QuantRecipe, weights: Mapping[str, Parameter], others: Iterable[str] = ()) -> list[str]:
    """Patterns that match nothing, or name what cannot be quantized. ``weights``: by module, tied ones included.

    ``others``: modules of the files that the model's class does without, which a rule may keep dense.

    A pattern may well match embeddings and norms beside linear layers, as ``layers``, ``vision_tower`` or ``.*`` do.
    One whose match reaches into the last part of an embedding's name, and which does not match every linear layer,
    was meant for it, and would be dropped without a word.
    """
    dense = set(recipe.dense_patterns)
    problems = [
        f"pattern {p!r} matches no module of the model"
        for p in recipe.unused_patterns(list(weights))
        if not (p in dense and any(re.search(p, name) for name in others))
    ]
    linear = {name for name, p in weights.items() if p.kind.quantized}
    for pattern in recipe.quantizing_patterns:
        matched = {name: p for name, p in weights.items() if re.search(pattern, name) and recipe.decide(name).scheme}
        refused = {n: p for n, p in matched.items() if not p.kind.nameable or p.tied_to is not None}
        named = [n for n, p in refused.items() if p.kind in (Kind.EMBEDDING, Kind.HEAD) and _names(pattern, n)]
        meant = [] if linear <= set(matched) else named
        if len(refused) == len(matched):
            meant = list(refused)
        if meant:
            what = weights[meant[0]].reason or str(weights[meant[0]].kind)
            problems.append(
                f"pattern {pattern!r} names {meant[0]}, which cannot be quantized ({what}); narrow the pattern, or "
                f"exclude {meant[0]}"
            )
    return problems


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern is found in the last part of a module's name, not only in the path to it."""
    return any(found.end() > module.rfind(".") + 1 for found in re.finditer(pattern, module))


class Accident(NamedTuple):
    """Too much stays dense: which share of the numbers in matrices, and the largest matrix of them."""

    share: float
    largest: Kept


def dense_by_accident(kept: Iterable[Kept], total: int) -> Accident | None:
    """Whether too large a share of ``total`` numbers in matrices stays dense without anybody having said so."""
    kept = list(kept)
    share = sum(k.size for k in kept) / total if total else 0.0
    return Accident(share, max(kept, key=lambda k: k.size)) if share > MAX_DENSE_SHARE else None


def engine_problems(schemes: Mapping[str, QuantScheme | None]) -> list[str]:
    """Why serving engines cannot read a model in which each linear layer has its scheme, None for dense.

    They make one matrix of some layers, whose members must have one format.
    """
    members: dict[str, list[str]] = {}
    for module, group in fused_groups(schemes).items():
        members.setdefault(group, []).append(module)
    dense = {layer.name for layer in FUSED_LAYERS if layer.dense}
    found: dict[str, list[str]] = {}
    for group, modules in members.items():
        own = [module.removeprefix(_common(modules)) for module in modules]
        formats = [schemes[module] for module in modules]
        if len({None if scheme is None else scheme.layout for scheme in formats}) > 1:
            found.setdefault(f"{_listed(own)} in one format, since they are fused", []).append(group)
        elif group.rpartition(".")[2] in dense and schemes[modules[0]] is not None:
            found.setdefault(f"{_listed(own)} dense", []).append(group)
    return [f"vLLM and SGLang need {what} ({len(groups)} layers)" for what, groups in found.items()]


def _common(modules: list[str]) -> str:
    """What all the names begin with, up to a dot."""
    parts = [module.split(".")[:-1] for module in modules]
    same = [a for a, *others in zip(*parts, strict=False) if all(a == b for b in others)]
    return "".join(f"{part}." for part in same)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
