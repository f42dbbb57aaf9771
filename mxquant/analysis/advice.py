"""A diagnosis in words: what to use, and the numbers that say so."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from mxquant.analysis.advice_on_scales import inversions, large_scales, small_scales
from mxquant.analysis.defaults import BUDGET, BUDGETS
from mxquant.analysis.diagnosis import TIE, Diagnosis, Mix
from mxquant.analysis.measure import MatrixErrors
from mxquant.analysis.words import name, percent
from mxquant.schemes.formats import QuantScheme

# Errors of projections that differ by less are not worth a word.
_ALIKE = 1.05
# A largest weight of this many standard deviations is an outlier: in 2^24 Gaussian weights it is 5.4.
_OUTLIER = 20.0
# How far the error of Gaussian weights may be off to count as right.
_NEAR = 0.1


def advice(d: Diagnosis, mix: Mix) -> list[str]:
    """Sentences, the most useful first. Errors are roots of squared error over squared norm, as in reports."""
    return [
        *_best(d, mix.budget),
        _mixed(d, mix),
        *small_scales(d),
        *large_scales(d),
        *inversions(d),
        *_groups(d),
        *_outliers(d),
        *_gaussian(d),
        *_caveats(d),
    ]


def budgets(d: Diagnosis, wanted: float) -> dict[float, QuantScheme]:
    """Budget -> best scheme, for the usual budgets and the wanted one; those that no scheme fits are left out."""
    found = {b: d.best(b) for b in sorted({*BUDGETS, wanted})}
    return {b: s for b, s in found.items() if s is not None}


def _best(d: Diagnosis, wanted: float) -> Iterator[str]:
    named: dict[QuantScheme, list[str]] = defaultdict(list)
    for b, s in budgets(d, wanted).items():
        named[s].append(f"{b:g}")
    if not named:
        return
    each = [f"{name(d, s)} at {' and '.join(numbers)}" for s, numbers in named.items()]
    yield f"Best single scheme for so many bits per weight: {'; '.join(each)}."
    best = d.best(wanted)
    if best is None:
        return
    bits = d.bits_per_weight(best)
    alike = [s for s in d.schemes if s != best and abs(d.bits_per_weight(s) - bits) < 1e-6]
    close = [s.text for s in alike if d.total_cost(s) <= d.total_cost(best) * (1 + TIE)]
    if close:
        yield f"As good as {best.text}, within 1%, at the same size: {', '.join(close)}."
    least = d.total_cost(best)
    worse = [f"{s.text} {d.total_cost(s) / least:.2f}x" for s in alike if s.text not in close] if least else []
    if worse:
        what = "its expected KL" if d.calibration else "its squared error"
        yield f"Others of that size have a multiple of {what}: {', '.join(worse)}."


def _mixed(d: Diagnosis, mix: Mix) -> str:
    counts: dict[QuantScheme, int] = defaultdict(int)
    for t in d.matrices:
        counts[mix.chosen[t.tensor.name]] += t.parameters
    parts = [f"{s.text} on {percent(n / d.parameters)}" for s, n in sorted(counts.items(), key=lambda item: -item[1])]
    text = f"A mix at {mix.bits_per_weight:.4g} bits per weight: {', '.join(parts)} of the weights"
    best = d.best(mix.budget)
    if best is None or not d.total_cost(best):
        return f"{text}."
    saved = 1 - mix.cost / d.total_cost(best)
    if len(counts) == 1 or saved < 0.001:
        return f"{text}; mixing schemes gains nothing here over {best.text}."
    what = (
        f"expected KL {mix.cost:.3g} against {d.total_cost(best):.3g} nats per token"
        if d.calibration
        else f"mean squared error of the matrices {mix.cost / len(d.matrices):.3g} against "
        f"{d.total_cost(best) / len(d.matrices):.3g}"
    )
    return f"{text}; {what} for {best.text}, {percent(saved)} less."


def _groups(d: Diagnosis) -> Iterator[str]:
    """Which projections matter more, or err more, than others."""
    best = d.best(max(BUDGET, min(map(d.bits_per_weight, d.schemes))))
    if best is None or len(d.groups) < 2:
        return
    if d.calibration:
        total = d.total_cost(best)
        if not total:
            return
        shares = {
            g: (sum(d.cost(t, best) for t in ts) / total, sum(t.parameters for t in ts) / d.parameters)
            for g, ts in d.groups.items()
        }
        order = sorted(shares, key=lambda g: -shares[g][0] / shares[g][1])
        high, low = order[0], order[-1]
        yield (
            f"With {best.text}, {high} is the most sensitive for its size: {percent(shares[high][0])} of the expected "
            f"KL with {percent(shares[high][1])} of the weights; {low} the least: {percent(shares[low][0])} with "
            f"{percent(shares[low][1])}."
        )
        worst = max(d.matrices, key=lambda t: d.cost(t, best))
        yield f"The most costly matrix is {worst.name}: {percent(d.cost(worst, best) / total)} of the expected KL."
        return
    errors = {g: d.measured(best, ts).mse ** 0.5 for g, ts in d.groups.items()}
    high, low = max(errors, key=lambda g: errors[g]), min(errors, key=lambda g: errors[g])
    if errors[high] <= errors[low] * _ALIKE:
        yield f"With {best.text} all projections have the same error, up to {percent(_ALIKE - 1)}."
        return
    yield (
        f"With {best.text} the error is largest in {high} ({percent(errors[high])}) and smallest in {low} "
        f"({percent(errors[low])})."
    )


def _outliers(d: Diagnosis) -> Iterator[str]:
    found = [t for t in d.matrices if t.weights.peak > _OUTLIER]
    if not found:
        return
    worst = max(found, key=lambda t: t.weights.peak)
    text = (
        f"{len(found)} of {len(d.matrices)} matrices have weights beyond {_OUTLIER:g} sigma, most so {worst.name} "
        f"({worst.weights.peak:.3g} sigma, kurtosis {worst.weights.kurtosis:.3g})"
    )
    pair = _smallest_and_largest(d)
    if pair is None:
        yield f"{text}."
        return
    there, everywhere = (_ratio(d, pair, [worst]), _ratio(d, pair, d.matrices))
    yield (
        f"{text}; there {pair[1].text} has {there:.3g} times the error of {pair[0].text}, "
        f"against {everywhere:.3g} times over all matrices."
    )


def _smallest_and_largest(d: Diagnosis) -> tuple[QuantScheme, QuantScheme] | None:
    """Schemes that differ in their block only, the pair with blocks furthest apart."""
    pairs = [
        (a, b)
        for a in d.schemes
        for b in d.schemes
        if not isinstance(a.block, tuple)
        and not isinstance(b.block, tuple)
        and a.block < b.block
        and replace(a, block=b.block) == b
    ]
    return max(pairs, key=lambda p: p[1].block_shape[1] / p[0].block_shape[1], default=None)


def _ratio(d: Diagnosis, pair: tuple[QuantScheme, QuantScheme], matrices: list[MatrixErrors]) -> float:
    small, large = (d.measured(s, matrices).mse for s in pair)
    return float((large / small) ** 0.5) if small else 1.0


def _gaussian(d: Diagnosis) -> Iterator[str]:
    """How far Gaussian weights explain the errors."""
    gaps = {
        (t.name, s): t.measured[s].mse / mse - 1
        for t in d.matrices
        for s in d.schemes
        if (mse := d.predictions[t.name][s])
    }
    if not gaps:
        return
    near = sum(abs(gap) <= _NEAR for gap in gaps.values()) / len(gaps)
    middle = statistics.median(t.weights.kurtosis for t in d.matrices)
    which, scheme = max(gaps, key=lambda key: abs(gaps[key]))
    kurtosis = next(t.weights.kurtosis for t in d.matrices if t.name == which)
    yield (
        f"Squared errors are within {_NEAR:.0%} of those of Gaussian weights in {percent(near)} of all cases (median "
        f"kurtosis {middle:.3g}, a Gaussian's is 3); furthest off is {which} with {scheme.text}, by "
        f"{gaps[which, scheme]:+.0%} (kurtosis {kurtosis:.3g})."
    )


def _caveats(d: Diagnosis) -> Iterator[str]:
    dense = [t for t in d.plan.dense if len(t.shape) > 1 and not t.kind.expected]
    if dense:
        largest = max(dense, key=lambda t: t.parameters)
        yield (
            f"Not looked at: {sum(t.parameters for t in dense) / 1e6:.3g} M weights in {len(dense)} matrices, e.g. "
            f"{largest.name} ({largest.reason})."
        )
    if d.assumed:
        yield (
            f"The calibration text did not reach {len(d.assumed)} matrices, e.g. {d.assumed[0]}; they are taken to be "
            "as sensitive as the others of their projection."
        )
    if d.sample < 1:
        yield f"Measured on {percent(d.sample)} of the rows of each matrix."
    if d.calibration is None:
        yield (
            "Without calibration each matrix counts the same; --calibration FILE weighs them by what errors in them do "
            "to the model's predictions."
        )
