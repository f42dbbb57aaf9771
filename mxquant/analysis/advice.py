"""A diagnosis in words: what to use, and the numbers that say so."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from mxquant.analysis.defaults import BUDGET, BUDGETS
from mxquant.analysis.diagnosis import TIE, Diagnosis, Mix
from mxquant.analysis.errors import MatrixErrors
from mxquant.formats import QuantScheme
from mxquant.plan import KNOWN_KINDS

# Scales that are zero or subnormal, or the largest of their format, are worth a word above this share.
SHARE = 0.01
# Errors that differ by less are the same.
_CLOSE = 1 + TIE
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
        *_small_scales(d),
        *_large_scales(d),
        *_inversions(d),
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
    each = [f"{_name(d, s)} at {' and '.join(numbers)}" for s, numbers in named.items()]
    yield f"Best single scheme for so many bits per weight: {'; '.join(each)}."
    best = d.best(wanted)
    if best is None:
        return
    bits = d.bits_per_weight(best)
    alike = [s for s in d.schemes if s != best and abs(d.bits_per_weight(s) - bits) < 1e-6]
    close = [s.text for s in alike if d.total_cost(s) <= d.total_cost(best) * _CLOSE]
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
    parts = [f"{s.text} on {_percent(n / d.parameters)}" for s, n in sorted(counts.items(), key=lambda item: -item[1])]
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
    return f"{text}; {what} for {best.text}, {_percent(saved)} less."


def _small_scales(d: Diagnosis) -> Iterator[str]:
    """Schemes with blocks too small in value for their scales, and the cures among the schemes measured."""
    for scheme in d.schemes:
        m, fmt = d.measured(scheme), scheme.scale_format
        zero, subnormal = m.share(m.stats.zero_scales), m.share(m.stats.subnormal_scales)
        if zero + subnormal <= SHARE:
            continue
        widths = [t.weights.sigma for t in d.matrices]
        need = scheme.element_format.max * fmt.min_normal
        cures = [
            s
            for s in d.schemes
            if s.block == scheme.block and s.element == scheme.element and d.measured(s).mse < m.mse / _CLOSE
        ]
        cures.sort(key=lambda s: d.measured(s).mse)
        help_ = f"; use {' or '.join(_name(d, s) for s in cures[:2])}" if cures else _try_others(scheme)
        yield (
            f"{_percent(zero + subnormal)} of the {scheme.scale} scales at block {scheme.block_text} are zero "
            f"({_percent(zero)}) or subnormal ({_percent(subnormal)}), because they need blocks with a weight of "
            f"{need:.3g} and the matrices' sigma is {_range(widths)}: error {_percent(m.mse**0.5)}{help_}."
        )


def _try_others(scheme: QuantScheme) -> str:
    other = ["ue5m3 scales"] * (scheme.scale == "e4m3") + ["a global scale"] * (not scheme.global_scale)
    return f"; try {' or '.join(other)}" if other else ""


def _large_scales(d: Diagnosis) -> Iterator[str]:
    for scheme in d.schemes:
        m = d.measured(scheme)
        share = m.share(m.saturated_scales)
        if share > SHARE:
            most = max(t.weights.largest for t in d.matrices)
            holds = scheme.element_format.max * scheme.scale_format.max
            yield (
                f"{_percent(share)} of the {scheme.scale} scales at block {scheme.block_text} are the largest there "
                f"is: weights reach {most:.3g}, the scheme {holds:.3g}; error {_percent(m.mse**0.5)}."
            )


def _inversions(d: Diagnosis) -> Iterator[str]:
    """Smaller blocks, and more bits, with a larger error."""
    families: dict[QuantScheme, list[QuantScheme]] = defaultdict(list)
    for s in d.schemes:
        if not isinstance(s.block, tuple):
            families[replace(s, block=2)].append(s)
    for members in families.values():
        members.sort(key=lambda s: s.block_shape[1])
        for small, large in pairwise(members):
            a, b = d.measured(small).mse, d.measured(large).mse
            if a > b * _CLOSE:
                yield (
                    f"Finer is worse: {small.scale} has error {_percent(a**0.5)} at block {small.block_text} "
                    f"and {_percent(b**0.5)} at block {large.block_text}, for fewer bits."
                )


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
            f"With {best.text}, {high} is the most sensitive for its size: {_percent(shares[high][0])} of the expected "
            f"KL with {_percent(shares[high][1])} of the weights; {low} the least: {_percent(shares[low][0])} with "
            f"{_percent(shares[low][1])}."
        )
        worst = max(d.matrices, key=lambda t: d.cost(t, best))
        yield f"The most costly matrix is {worst.name}: {_percent(d.cost(worst, best) / total)} of the expected KL."
        return
    errors = {g: d.measured(best, ts).mse ** 0.5 for g, ts in d.groups.items()}
    high, low = max(errors, key=lambda g: errors[g]), min(errors, key=lambda g: errors[g])
    if errors[high] <= errors[low] * _ALIKE:
        yield f"With {best.text} all projections have the same error, up to {_percent(_ALIKE - 1)}."
        return
    yield (
        f"With {best.text} the error is largest in {high} ({_percent(errors[high])}) and smallest in {low} "
        f"({_percent(errors[low])})."
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
    name, scheme = max(gaps, key=lambda key: abs(gaps[key]))
    kurtosis = next(t.weights.kurtosis for t in d.matrices if t.name == name)
    yield (
        f"Squared errors are within {_NEAR:.0%} of those of Gaussian weights in {_percent(near)} of all cases (median "
        f"kurtosis {middle:.3g}, a Gaussian's is 3); furthest off is {name} with {scheme.text}, by "
        f"{gaps[name, scheme]:+.0%} (kurtosis {kurtosis:.3g})."
    )


def _caveats(d: Diagnosis) -> Iterator[str]:
    dense = [t for t in d.plan.dense if len(t.shape) > 1 and t.kind not in KNOWN_KINDS]
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
        yield f"Measured on {_percent(d.sample)} of the rows of each matrix."
    if d.calibration is None:
        yield (
            "Without calibration each matrix counts the same; --calibration FILE weighs them by what errors in them do "
            "to the model's predictions."
        )


def _name(d: Diagnosis, scheme: QuantScheme) -> str:
    """A scheme with its error, and the expected KL where it is known."""
    error = f"{scheme.text} (error {_percent(d.measured(scheme).mse ** 0.5)}"
    return f"{error}, expected KL {d.total_cost(scheme):.3g})" if d.calibration else f"{error})"


def _percent(share: float) -> str:
    """``7.9%``, ``31%``, ``0.02%``: two digits."""
    value = 100 * share
    return f"{value:.0f}%" if value >= 99.5 or value == 0 else f"{value:.2g}%"


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2g}" if high < 1.05 * low else f"{low:.2g} to {high:.2g}"
