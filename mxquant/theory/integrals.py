"""Errors of scale rules that look at ``amax`` alone, integrated over the block maximum.

Let ``H`` be the distribution function of ``|X|`` and ``N`` the size of a block, the scale be ``s_k`` while
``a_k <= amax < b_k``, and ``E(s, a)`` the expected error of one element with scale ``s`` where
``|X| <= a``, zero elsewhere. An element and the other ``N - 1`` lie below ``a`` independently, so that ::

    total   = sum_k  H(b_k)^(N-1) E(s_k, b_k) - H(a_k)^(N-1) E(s_k, a_k)
    maximum = integral of  h(m) H(m)^(N-1) e(m, s(m))  over m      (e: error of m itself)
    zero    = the term of the total with s = 0
    others  = total - maximum - zero

The first line integrates over the true block maximum exactly, in closed form; the second is a
Gauss-Legendre sum between all points where the integrand has a kink. Exact (fp32) scales
``s = amax/M`` leave no error at the maximum, and the others are integrated over it.
"""

from __future__ import annotations

import math

import numpy as np

from mxquant.schemes.formats import QuantScheme
from mxquant.theory.distributions import Distribution, maximum_quantiles
from mxquant.theory.elements import ElementError, element_error
from mxquant.theory.levels import Levels, scale_levels
from mxquant.theory.parts import ErrorParts

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
# Quantiles of the block maximum between which its density is smooth: in logits, from 1e-15 to 1 - 1e-15.
_LOGITS = np.concatenate((np.linspace(-34, -6, 12), np.linspace(-5, 5, 21), np.linspace(6, 34, 12)))


def integrated_error(
    scheme: QuantScheme, sigma: float, of: Distribution, metric: str, global_scale: float | None
) -> ErrorParts:
    """What :func:`mxquant.theory.error` returns, exact but for rounding and quadrature (below 1e-6, relative)."""
    element, size = element_error(scheme.element, scheme.rounding, metric), math.prod(scheme.block_shape)
    if scheme.scale == "fp32":
        return ErrorParts(others=_exact_scales(element, scheme.element_format.max, size, of), maximum=0.0, zero=0.0)
    levels = scale_levels(scheme, global_scale or 1.0).seen_by(sigma, of.reach)
    zero, live = _by_level(element, levels, size, of)
    maximum = _maximum(element, levels, size, of)
    return ErrorParts(max(live - maximum, 0.0), maximum, zero, **_shares(scheme, levels, size, of))


def integrated_total(
    scheme: QuantScheme, sigma: float, of: Distribution, metric: str, global_scale: float | None
) -> float:
    """``integrated_error(...).total`` in a fraction of the time: mostly a closed form."""
    if scheme.scale == "fp32":
        return integrated_error(scheme, sigma, of, metric, global_scale).total
    levels = scale_levels(scheme, global_scale or 1.0).seen_by(sigma, of.reach)
    element = element_error(scheme.element, scheme.rounding, metric)
    return sum(_by_level(element, levels, math.prod(scheme.block_shape), of))


def _by_level(element: ElementError, levels: Levels, size: int, of: Distribution) -> tuple[float, float]:
    """Error in blocks whose scale is zero, and in all others: the closed form of the module docstring."""
    below, *moments = of.moments(levels.bounds)
    lost = int(levels.scales[0] == 0)
    # The energy, or the mean magnitude, of an element in a block below the first bound.
    zero = below[1] ** (size - 1) * moments[element.power - 1][1] if lost else 0.0
    others_below = below ** (size - 1)
    scales, low, high = levels.scales[lost:], levels.bounds[lost:-1], levels.bounds[lost + 1 :]
    upper = others_below[lost + 1 :] * element.up_to(high, scales, of)
    lower = others_below[lost:-1] * element.up_to(low, scales, of)
    return float(zero), float((upper - lower).sum())


def _maximum(element: ElementError, levels: Levels, size: int, of: Distribution) -> float:
    """Error of the largest element, spread over the block; blocks whose scale is zero excluded."""
    lost = int(levels.scales[0] == 0)
    scales, low, high = levels.scales[lost:], levels.bounds[lost:-1], levels.bounds[lost + 1 :]
    if not scales.size:
        return 0.0
    quantiles = maximum_quantiles(_LOGITS, size, of)
    end = quantiles[-1]
    kinks = np.clip(element.knots * scales[:, None], low[:, None], high[:, None]).ravel()
    cuts = np.unique(np.clip(np.concatenate((kinks, quantiles)), low[0], max(end, low[0])))
    x, weights = _nodes(cuts)
    scale = scales[np.searchsorted(high[:-1], x)]
    density = of.density(x) * of.moments(x)[0] ** (size - 1)
    # Beyond the last quantile the others lie below for certain: closed form again, for heavy tails.
    tail = high > end
    beyond = element.up_to(high[tail], scales[tail], of) - element.up_to(np.maximum(low, end)[tail], scales[tail], of)
    return float((weights * density * element.at(x, scale)).sum() + beyond.sum())


def _exact_scales(element: ElementError, largest: float, size: int, of: Distribution) -> float:
    """Error of the others where every block's maximum is the largest element, exactly."""
    x, weights = _nodes(np.concatenate(([0.0], maximum_quantiles(_LOGITS, size, of))))
    density = (size - 1) * of.density(x) * of.moments(x)[0] ** (size - 2)
    return float((weights * density * element.up_to(x, x / largest, of)).sum())


def _nodes(cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of a quadrature over ``cuts[0] .. cuts[-1]``, of high order between the cuts."""
    half = np.diff(cuts)[:, None] / 2
    middle = (cuts[1:] + cuts[:-1])[:, None] / 2
    return (middle + half * _NODES).ravel(), (half * _WEIGHTS).ravel()


def _shares(scheme: QuantScheme, levels: Levels, size: int, of: Distribution) -> dict[str, float]:
    """Shares of blocks, as :class:`ErrorParts` names them."""
    below = of.moments(levels.bounds)[0] ** size
    mass = below[1:] - below[:-1]
    fits = np.clip(levels.scales * scheme.element_format.max, levels.bounds[:-1], levels.bounds[1:])
    clipped = (below[1:] - of.moments(fits)[0] ** size)[levels.scales > 0]
    return {
        "zero_scales": float(mass[levels.scales == 0].sum()),
        "subnormal_scales": float(mass[levels.subnormal].sum()),
        "saturated_scales": float(clipped[-1]) if levels.complete else 0.0,
        "clipped": float(clipped.sum()),
    }
