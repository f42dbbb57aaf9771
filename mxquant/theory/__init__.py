"""What a scheme costs on weights of a given distribution: expected errors, their parts, crossovers.

``mxquant.theory.mse("ue5m3", block=16, sigma=0.02)`` is the mean squared error of weights with standard
deviation 0.02, relative to their variance.

**Units.** ``sigma`` is the standard deviation of the weights, in the weights' own unit. Squared errors are
means over elements relative to ``sigma^2``, so that 1 means that everything is lost; absolute errors are
means relative to ``sigma``.

**Method.** Weights are independent, their distribution is symmetric. The error is integrated over the
true maximum of a block, for any element, block, scale and rounding: :mod:`mxquant.theory.integrals` has the
formulas. Real numbers stand for the codec's fp32. The setting is that of arXiv 2601.19026, which conditions
on the rounded scale instead, an approximation.

**Scale rules.** A bare scale name such as ``"e4m3"`` has that paper's rule, ``absmax``; ``"e8m0"`` has its
default, ``even``. A ``QuantScheme`` or a full text such as ``"e4m3/16/ceil"`` has its own. The rules
``search`` and ``four-over-six`` see the whole block rather than its maximum: there the codec quantizes blocks
drawn from the distribution, and the result has a standard error (:mod:`mxquant.theory.sampled`).
"""

from __future__ import annotations

from mxquant.extras import needs
from mxquant.schemes.formats import QuantScheme

needs("mxquant.theory", "scipy", extra="theory")

from mxquant.theory.crossings import HIGH, LOW, Crossover, crossovers, doubled
from mxquant.theory.curves import Curve, curve, is_periodic, octave_mean
from mxquant.theory.distributions import Distribution, Gaussian, Laplace, StudentT, Uniform
from mxquant.theory.distributions import distribution as distribution_of
from mxquant.theory.expected import TENSOR_ELEMENTS, error, total_error
from mxquant.theory.levels import is_sampled
from mxquant.theory.naming import is_bare_scale, scheme_of
from mxquant.theory.parts import ErrorParts

__all__ = [
    "HIGH",
    "LOW",
    "TENSOR_ELEMENTS",
    "Crossover",
    "Curve",
    "Distribution",
    "ErrorParts",
    "Gaussian",
    "Laplace",
    "StudentT",
    "Uniform",
    "crossovers",
    "curve",
    "distribution_of",
    "doubled",
    "error",
    "is_bare_scale",
    "is_periodic",
    "is_sampled",
    "mse",
    "octave_mean",
    "scheme_of",
    "total_error",
]


def mse(
    scheme: QuantScheme | str,
    block: int | tuple[int, int] | None = None,
    *,
    sigma: float,
    element: str | None = None,
    rule: str | None = None,
    rounding: str | None = None,
    distribution: str | Distribution = "gaussian",
    global_scale: float | None = None,
    tensor_elements: int = TENSOR_ELEMENTS,
) -> float:
    """Expected squared error of weights with standard deviation ``sigma``, relative to ``sigma^2``.

    Parameters
    ----------
    scheme : a scale (``"ue5m3"``, ``"e4m3+global"``), a scheme's text (``"nvfp4"``) or a ``QuantScheme``.
    block, element, rule, rounding : replace those of the scheme. A bare scale has blocks of 16,
        fp4_e2m1 elements, and the rule absmax (even for e8m0).
    distribution, global_scale, tensor_elements : as for :func:`error`.

    Raises ``SchemeError`` and ``TheoryError``.
    """
    asked = scheme_of(scheme, block=block, element=element, rule=rule, rounding=rounding)
    return total_error(
        asked, sigma, distribution=distribution, global_scale=global_scale, tensor_elements=tensor_elements
    )
