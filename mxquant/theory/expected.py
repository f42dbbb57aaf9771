"""The expected error of a scheme: by a formula, or by sampling where its scale rule has none."""

from __future__ import annotations

import math

import numpy as np

from mxquant.errors import TheoryError
from mxquant.schemes.formats import QuantScheme
from mxquant.theory.distributions import Distribution, maximum_quantiles
from mxquant.theory.distributions import distribution as distribution_of
from mxquant.theory.integrals import integrated_error, integrated_total
from mxquant.theory.levels import is_sampled
from mxquant.theory.parts import ErrorParts

# Elements of a tensor whose largest sets the global scale, unless told: a matrix of 4096 x 4096.
TENSOR_ELEMENTS = 1 << 24


def error(
    scheme: QuantScheme,
    sigma: float,
    *,
    distribution: str | Distribution = "gaussian",
    metric: str = "squared",
    global_scale: float | None = None,
    tensor_elements: int = TENSOR_ELEMENTS,
) -> ErrorParts:
    """Expected error of independent weights with standard deviation ``sigma`` under a scheme.

    Parameters
    ----------
    scheme : any; a tile counts as a block of as many elements. Rows are taken to be whole blocks.
    distribution : ``gaussian``, ``laplace``, ``uniform``, ``student-t:DF``, or an object of
        :mod:`mxquant.theory.distributions`.
    metric : ``squared`` or ``absolute``.
    global_scale : for schemes that have one. None takes that of a tensor of ``tensor_elements``
        weights whose largest is at its median. A block's own maximum is taken to be independent of it.

    Rules that choose by the whole block (search, four-over-six) have no such formula: blocks are
    drawn, stratified by their maximum, and quantized by the codec itself (this imports torch). The
    result is the same at every call and has its ``standard_error``.

    Raises ``TheoryError`` for a ``sigma`` that is not positive and finite, and unknown names.
    """
    check_sigma(sigma)
    of = distribution_of(distribution)
    divisor = _global_scale(scheme, sigma, of, global_scale, tensor_elements)
    if is_sampled(scheme):
        from mxquant.theory.sampled import sampled_error

        return sampled_error(scheme, sigma, of, metric, divisor)
    return integrated_error(scheme, sigma, of, metric, divisor)


def total_error(
    scheme: QuantScheme,
    sigma: float,
    *,
    distribution: str | Distribution = "gaussian",
    metric: str = "squared",
    global_scale: float | None = None,
    tensor_elements: int = TENSOR_ELEMENTS,
) -> float:
    """``error(...).total`` without its parts, which takes a fraction of the time."""
    if is_sampled(scheme):
        return error(
            scheme,
            sigma,
            distribution=distribution,
            metric=metric,
            global_scale=global_scale,
            tensor_elements=tensor_elements,
        ).total
    check_sigma(sigma)
    of = distribution_of(distribution)
    divisor = _global_scale(scheme, sigma, of, global_scale, tensor_elements)
    return integrated_total(scheme, sigma, of, metric, divisor)


def check_sigma(sigma: float) -> None:
    """Raise ``TheoryError`` unless this is a standard deviation."""
    if not 0 < sigma < math.inf:
        raise TheoryError(f"sigma must be a positive, finite number, not {sigma}")


def _global_scale(
    scheme: QuantScheme, sigma: float, of: Distribution, given: float | None, tensor_elements: int
) -> float | None:
    """What block scales are divided by, None without a global scale; as :func:`.global_scale_for`."""
    if not scheme.global_scale:
        if given is not None:
            raise TheoryError(f"{scheme.text} has no global scale, but one was given")
        return None
    if given is not None:
        if not 0 < given < math.inf:
            raise TheoryError(f"the global scale must be a positive, finite number, not {given}")
        return float(given)
    if tensor_elements < 2:
        raise TheoryError(f"a tensor must have at least two elements, not {tensor_elements}")
    fmt = scheme.scale_format
    target = fmt.max if fmt.coded and not fmt.exponent_only else 1.0
    if scheme.scale_rule == "four-over-six" and target > 1:
        target = 2.0 ** math.floor(math.log2(target))
    largest = sigma * float(maximum_quantiles(np.array(0.0), tensor_elements, of))
    return target * scheme.element_format.max / largest
