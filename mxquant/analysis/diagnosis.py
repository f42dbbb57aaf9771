"""``Diagnosis``: what was measured of a model's weights, added up, and the best schemes for a budget of bits.

An allocation of schemes should keep their total *cost* small. The cost of a scheme on a tensor is

- its squared error over the tensor's squared norm, where nothing else is known: each tensor counts the
  same, whatever its size and width. Rescaling a model without a change of function does not change it;
- the KL divergence in nats per token that it is expected to cause, with the sensitivities of a calibration
  text (:mod:`mxquant.analysis.sensitivity`).

``docs/diagnose.md`` has the evidence for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mxquant.analysis.allocate import Option, allocate
from mxquant.analysis.errors import Measured, TensorErrors
from mxquant.analysis.places import place, short_names
from mxquant.analysis.predict import gaussian_mse
from mxquant.analysis.recipes import compact_recipe
from mxquant.analysis.sensitivity import Calibration
from mxquant.errors import SchemeError
from mxquant.formats import QuantScheme
from mxquant.plan import QuantPlan, TensorPlan
from mxquant.recipe import QuantRecipe
from mxquant.transformers.architectures import fused_group

# Bits per weight are compared with a budget up to rounding.
_ROUNDING = 1e-9
# Schemes of one size are as good as each other if choosing between them tensor by tensor gains less than this.
_TIE = 0.01


@dataclass
class Mix:
    """The schemes of least total cost within ``budget`` bits per weight, one for each tensor by name.

    ``bound``: no choice among the schemes within the budget costs less. ``recipe`` gives each its scheme.
    """

    budget: float
    chosen: dict[str, QuantScheme]
    bits_per_weight: float
    cost: float
    bound: float
    recipe: QuantRecipe

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "bits_per_weight": self.bits_per_weight,
            "cost": self.cost,
            "cost_lower_bound": self.bound,
            "schemes": {name: scheme.text for name, scheme in self.chosen.items()},
            "recipe": self.recipe.to_dict(),
        }


@dataclass
class Diagnosis:
    """What was measured; made by :func:`mxquant.analysis.diagnose.diagnose`.

    ``sample``: the share of the rows that was looked at. ``assumed``: names of tensors that the calibration text
    did not reach; they are taken to be as sensitive as the others of their projection.
    """

    plan: QuantPlan
    schemes: list[QuantScheme]
    tensors: list[TensorErrors]
    sample: float
    calibration: Calibration | None
    assumed: list[str]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> int:
        return sum(t.tensor.parameters for t in self.tensors)

    def cost(self, t: TensorErrors, scheme: QuantScheme) -> float:
        """What is summed over tensors: see the module docstring."""
        measured = t.measured[scheme]
        if self.calibration is None:
            return measured.mse
        return measured.cost * t.tensor.parameters / measured.stats.elements

    def total_cost(self, scheme: QuantScheme) -> float:
        return sum(self.cost(t, scheme) for t in self.tensors)

    def bits_per_weight(self, scheme: QuantScheme) -> float:
        """Stored bits of all tensors with this scheme, over their weights; global scales are not counted."""
        return sum(bits_of(scheme, t.tensor) for t in self.tensors) / self.parameters

    def measured(self, scheme: QuantScheme, tensors: Iterable[TensorErrors] | None = None) -> Measured:
        """What a scheme did to some tensors, or all."""
        return sum((t.measured[scheme] for t in (self.tensors if tensors is None else tensors)), Measured())

    def predicted_mse(self, scheme: QuantScheme, tensors: Iterable[TensorErrors] | None = None) -> float | None:
        """What :meth:`measured` would have as ``mse`` were each tensor Gaussian; None if all are zero."""
        signal = error = 0.0
        for t in self.tensors if tensors is None else tensors:
            mse = self.predictions[t.tensor.name][scheme]
            if mse is not None:
                signal += t.measured[scheme].stats.signal
                error += mse * t.measured[scheme].stats.signal
        return error / signal if signal else None

    @cached_property
    def predictions(self) -> dict[str, dict[QuantScheme, float | None]]:
        """Tensor name -> scheme -> squared error, relative, of a Gaussian tensor of the same width."""
        return {
            t.tensor.name: {s: gaussian_mse(s, t.weights.sigma, t.global_scales.get(s)) for s in self.schemes}
            for t in self.tensors
        }

    @cached_property
    def groups(self) -> dict[str, list[TensorErrors]]:
        """Tensors by projection, in model order."""
        names = short_names(place(t.tensor.module)[1] for t in self.tensors)
        found: dict[str, list[TensorErrors]] = defaultdict(list)
        for t in self.tensors:
            found[names[place(t.tensor.module)[1]]].append(t)
        return dict(found)

    def best(self, budget: float) -> QuantScheme | None:
        """The scheme of least total cost within this many bits per weight, None if none fits."""
        fitting = [s for s in self.schemes if self.bits_per_weight(s) <= budget * (1 + _ROUNDING)]
        return min(fitting, key=self.total_cost, default=None)

    def mix(self, budget: float) -> Mix:
        """The schemes of least total cost within a budget of bits per weight, global scales not counted.

        Projections that engines fuse get one scheme where any of the schemes has a global scale, which
        they would have to share.

        Raises ``SchemeError`` if no scheme fits the budget.
        """
        limit = int(budget * self.parameters * (1 + _ROUNDING))
        if not self._fits(self.schemes, limit):
            smallest = min(self.schemes, key=self.bits_per_weight)
            raise SchemeError(
                f"no scheme fits {budget:g} bits per weight; the smallest, {smallest.text}, needs "
                f"{self.bits_per_weight(smallest):.4g}: raise the budget, or add larger blocks"
            )
        # Schemes with a global scale tie tensors together; without them, each tensor is free.
        alone = [s for s in self.schemes if not s.global_scale]
        found = [self._mix(schemes, budget, limit) for schemes in (self.schemes, alone) if self._fits(schemes, limit)]
        best = min(found, key=lambda mix: (mix.cost, len(set(mix.chosen.values()))))
        return replace(best, bound=min(mix.bound for mix in found))

    def _fits(self, schemes: list[QuantScheme], limit: int) -> bool:
        return bool(schemes) and sum(min(bits_of(s, t.tensor) for s in schemes) for t in self.tensors) <= limit

    def _mix(self, schemes: list[QuantScheme], budget: float, limit: int) -> Mix:
        schemes = self._without_ties(schemes)
        units = self._units(schemes)
        items = [
            [Option(sum(bits_of(s, t.tensor) for t in unit), sum(self.cost(t, s) for t in unit)) for s in schemes]
            for unit in units
        ]
        found = allocate(items, limit)
        picked = {t.tensor.name: schemes[i] for unit, i in zip(units, found.picks, strict=True) for t in unit}
        chosen = {t.tensor.name: picked[t.tensor.name] for t in self.tensors}
        return Mix(budget, chosen, found.size / self.parameters, found.error, found.bound, self.recipe(chosen))

    def recipe(self, chosen: Mapping[str, QuantScheme]) -> QuantRecipe:
        """A short recipe that gives each tensor, by name, its scheme, and all others none."""
        modules = {t.tensor.module: chosen[t.tensor.name] for t in self.tensors}
        others = [t.module for t in self.plan.tensors if t.name not in chosen]
        return compact_recipe(modules, others, include=self.include, exclude=self.exclude)

    def _units(self, schemes: list[QuantScheme]) -> list[list[TensorErrors]]:
        """Tensors that get their scheme together."""
        if not any(s.global_scale for s in schemes):
            return [[t] for t in self.tensors]
        found: dict[str, list[TensorErrors]] = defaultdict(list)
        for t in self.tensors:
            found[fused_group(t.tensor.module) or t.tensor.name].append(t)
        return list(found.values())

    def _without_ties(self, schemes: list[QuantScheme]) -> list[QuantScheme]:
        """One scheme for each size, the best, where choosing among them by tensor would gain next to nothing."""
        by_size: dict[tuple[int, ...], list[QuantScheme]] = defaultdict(list)
        for s in schemes:
            by_size[tuple(bits_of(s, t.tensor) for t in self.tensors)].append(s)
        kept = []
        for equal in by_size.values():
            best = min(equal, key=self.total_cost)
            least = sum(min(self.cost(t, s) for s in equal) for t in self.tensors)
            kept += [best] if self.total_cost(best) <= least * (1 + _TIE) else equal
        return kept


def bits_of(scheme: QuantScheme, t: TensorPlan) -> int:
    return 8 * (scheme.nbytes(t.matrix) - (4 if scheme.global_scale else 0))
