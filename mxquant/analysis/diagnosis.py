"""``Diagnosis``: what was measured of a model's weights, added up, and the best schemes for a budget of bits.

An allocation of schemes should keep their total *cost* small. The cost of a scheme on a matrix is

- its squared error over the matrix's squared norm, where nothing else is known: each matrix counts the
  same, whatever its size and width. Rescaling a model without a change of function does not change it;
- the KL divergence in nats per token that it is expected to cause, with the sensitivities of a calibration
  text (:mod:`mxquant.analysis.sensitivity`).

``docs/diagnose.md`` has the evidence for both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mxquant.analysis.allocate import Option, allocate
from mxquant.analysis.measure import MatrixErrors, Measured
from mxquant.analysis.places import place, short_names
from mxquant.analysis.predict import gaussian_mse
from mxquant.analysis.recipes import compact_recipe
from mxquant.analysis.sensitivity import Calibration
from mxquant.convert.plan import QuantPlan
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

# Bits per weight are compared with a budget up to rounding.
_ROUNDING = 1e-9
# Schemes of one size are as good as each other if choosing between them matrix by matrix gains less than this.
TIE = 0.01


@dataclass
class Mix:
    """The schemes of least total cost within ``budget`` bits per weight, one for each tensor by name.

    ``bound``: no choice within the budget costs less, of schemes of one size that are as good as each other, to 1 %,
    one considered. ``recipe`` gives each tensor its scheme.
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
    """What was measured; made by :func:`mxquant.analysis.examine.diagnose`.

    ``sample``: the share of the rows that was looked at. ``assumed``: names of matrices that the calibration text
    did not reach; they are taken to be as sensitive as the others of their projection.
    """

    plan: QuantPlan
    schemes: list[QuantScheme]
    matrices: list[MatrixErrors]
    sample: float
    calibration: Calibration | None
    assumed: list[str]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.matrices)

    def cost(self, t: MatrixErrors, scheme: QuantScheme) -> float:
        """What is summed over matrices: see the module docstring."""
        measured = t.measured[scheme]
        if self.calibration is None:
            return measured.mse
        return measured.cost * t.parameters / measured.stats.elements

    def total_cost(self, scheme: QuantScheme) -> float:
        return sum(self.cost(t, scheme) for t in self.matrices)

    def bits_per_weight(self, scheme: QuantScheme) -> float:
        """Stored bits of all matrices with this scheme, over their weights; global scales are not counted."""
        return sum(bits_of(scheme, m.tensor.matrix) for m in self.matrices) / self.parameters

    def measured(self, scheme: QuantScheme, matrices: Iterable[MatrixErrors] | None = None) -> Measured:
        """What a scheme did to some matrices, or all."""
        return sum((t.measured[scheme] for t in (self.matrices if matrices is None else matrices)), Measured())

    def predicted_mse(self, scheme: QuantScheme, matrices: Iterable[MatrixErrors] | None = None) -> float | None:
        """What :meth:`measured` would have as ``mse`` were each matrix Gaussian; None if all are zero."""
        signal = error = 0.0
        for t in self.matrices if matrices is None else matrices:
            mse = self.predictions[t.name][scheme]
            if mse is not None:
                signal += t.measured[scheme].stats.signal
                error += mse * t.measured[scheme].stats.signal
        return error / signal if signal else None

    @cached_property
    def predictions(self) -> dict[str, dict[QuantScheme, float | None]]:
        """Matrix name -> scheme -> squared error, relative, of a Gaussian matrix of the same width."""
        return {
            t.name: {s: gaussian_mse(s, t.weights.sigma, t.global_scales.get(s)) for s in self.schemes}
            for t in self.matrices
        }

    @cached_property
    def groups(self) -> dict[str, list[MatrixErrors]]:
        """Matrices by projection, in model order."""
        names = short_names(place(t.tensor.module)[1] for t in self.matrices)
        found: dict[str, list[MatrixErrors]] = defaultdict(list)
        for t in self.matrices:
            found[names[place(t.tensor.module)[1]]].append(t)
        return dict(found)

    def best(self, budget: float) -> QuantScheme | None:
        """The scheme of least total cost within this many bits per weight, None if none fits.

        Of schemes of one size as good as each other, to 1 %, one without a global scale: it does without a
        pass over the weights.
        """
        fitting = [s for s in self.schemes if self.bits_per_weight(s) <= budget * (1 + _ROUNDING)]
        if not fitting:
            return None
        bits = self.bits_per_weight(min(fitting, key=self.total_cost))
        return self._preferred([s for s in fitting if self.bits_per_weight(s) == bits])

    def _preferred(self, schemes: list[QuantScheme]) -> QuantScheme:
        least = min(map(self.total_cost, schemes))
        close = [s for s in schemes if self.total_cost(s) <= least * (1 + TIE)]
        return min(close, key=lambda s: (s.global_scale, self.total_cost(s)))

    def mix(self, budget: float) -> Mix:
        """The schemes of least total cost within a budget of bits per weight, global scales not counted.

        Projections that engines fuse get one scheme where any of the schemes has a global scale, which
        they would have to share.

        Raises ``SchemeError`` if no scheme fits the budget.
        """
        tensors = list({id(m.tensor): m.tensor for m in self.matrices}.values())
        check_budget(budget, self.schemes, tensors)
        limit = _limit(budget, tensors)
        # Schemes with a global scale tie tensors together; without them, each tensor is free.
        alone = [s for s in self.schemes if not s.global_scale]
        choices = [schemes for schemes in (self.schemes, alone) if _least(schemes, tensors) <= limit]
        found = [self._mix(schemes, budget, limit) for schemes in choices]
        best = min(found, key=lambda mix: (mix.cost, len(set(mix.chosen.values()))))
        return replace(best, bound=min(mix.bound for mix in found))

    def _mix(self, schemes: list[QuantScheme], budget: float, limit: int) -> Mix:
        schemes = self._without_ties(schemes)
        units = self._units(schemes)
        items = [
            [
                Option(sum(bits_of(s, m.tensor.matrix) for m in unit), sum(self.cost(m, s) for m in unit))
                for s in schemes
            ]
            for unit in units
        ]
        found = allocate(items, limit)
        picked = {t.tensor.name: schemes[i] for unit, i in zip(units, found.picks, strict=True) for t in unit}
        chosen = {t.tensor.name: picked[t.tensor.name] for t in self.matrices}
        return Mix(budget, chosen, found.size / self.parameters, found.error, found.bound, self.recipe(chosen))

    def recipe(self, chosen: Mapping[str, QuantScheme]) -> QuantRecipe:
        """A short recipe that gives each tensor, by name, its scheme, and all others none."""
        modules = {t.tensor.module: chosen[t.tensor.name] for t in self.matrices}
        others = [t.module for t in self.plan.tensors if t.name not in chosen]
        return compact_recipe(modules, others, include=self.include, exclude=self.exclude)

    def _units(self, schemes: list[QuantScheme]) -> list[list[MatrixErrors]]:
        """Matrices that get their scheme together: those of a layer's experts, and those that share a global scale."""
        shared = any(s.global_scale for s in schemes)
        found: dict[str, list[MatrixErrors]] = defaultdict(list)
        for m in self.matrices:
            t = m.tensor
            found[t.place.parameter if t.place else (shared and t.group) or t.name].append(m)
        return list(found.values())

    def _without_ties(self, schemes: list[QuantScheme]) -> list[QuantScheme]:
        """One scheme for each size, the best, where choosing among them by tensor would gain next to nothing."""
        by_size: dict[tuple[int, ...], list[QuantScheme]] = defaultdict(list)
        for s in schemes:
            by_size[tuple(bits_of(s, m.tensor.matrix) for m in self.matrices)].append(s)
        kept = []
        for equal in by_size.values():
            best = self._preferred(equal)
            least = sum(min(self.cost(t, s) for s in equal) for t in self.matrices)
            kept += [best] if self.total_cost(best) <= least * (1 + TIE) else equal
        return kept


def check_budget(budget: float, schemes: list[QuantScheme], tensors: list[TensorPlan]) -> None:
    """Raise ``SchemeError`` if the tensors cannot be stored in so many bits per weight."""
    if _least(schemes, tensors) > _limit(budget, tensors):
        parameters = sum(t.parameters for t in tensors)
        sizes = {s: _least([s], tensors) / parameters for s in schemes}
        smallest = min(sizes, key=lambda s: sizes[s])
        raise SchemeError(
            f"no scheme fits {budget:g} bits per weight; the smallest, {smallest.text}, needs {sizes[smallest]:.4g}: "
            "raise the budget, or add larger blocks"
        )


def _limit(budget: float, tensors: list[TensorPlan]) -> int:
    return int(budget * sum(t.parameters for t in tensors) * (1 + _ROUNDING))


def _least(schemes: list[QuantScheme], tensors: list[TensorPlan]) -> float:
    """Bits of all tensors, each with its smallest scheme."""
    return sum((t.experts or 1) * min((bits_of(s, t.matrix) for s in schemes), default=math.inf) for t in tensors)


def bits_of(scheme: QuantScheme, matrix: tuple[int, int]) -> int:
    """Stored bits of a matrix of this shape, its global scale not counted."""
    return 8 * (scheme.nbytes(matrix) - (4 if scheme.global_scale else 0))
