"""What a diagnosis says of block scales: too small or too large for their format, and finer blocks that are worse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from mxquant.analysis.diagnosis import TIE, Diagnosis
from mxquant.analysis.words import name, percent, span
from mxquant.schemes.formats import QuantScheme

# Scales that are zero or subnormal, or the largest of their format, are worth a word above this share.
SHARE = 0.01


def small_scales(d: Diagnosis) -> Iterator[str]:
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
            if s.block == scheme.block and s.element == scheme.element and d.measured(s).mse * (1 + TIE) < m.mse
        ]
        cures.sort(key=lambda s: d.measured(s).mse)
        help_ = f"; use {' or '.join(name(d, s) for s in cures[:2])}" if cures else _try_others(scheme)
        yield (
            f"{percent(zero + subnormal)} of the {scheme.scale} scales at block {scheme.block_text} are zero "
            f"({percent(zero)}) or subnormal ({percent(subnormal)}), because they need blocks with a weight of "
            f"{need:.3g} and the matrices' sigma is {span(widths)}: error {percent(m.mse**0.5)}{help_}."
        )


def _try_others(scheme: QuantScheme) -> str:
    other = ["ue5m3 scales"] * (scheme.scale == "e4m3") + ["a global scale"] * (not scheme.global_scale)
    return f"; try {' or '.join(other)}" if other else ""


def large_scales(d: Diagnosis) -> Iterator[str]:
    for scheme in d.schemes:
        m = d.measured(scheme)
        share = m.share(m.saturated_scales)
        if share > SHARE:
            most = max(t.weights.largest for t in d.matrices)
            holds = scheme.element_format.max * scheme.scale_format.max
            yield (
                f"{percent(share)} of the {scheme.scale} scales at block {scheme.block_text} are the largest there "
                f"is: weights reach {most:.3g}, the scheme {holds:.3g}; error {percent(m.mse**0.5)}."
            )


def inversions(d: Diagnosis) -> Iterator[str]:
    """Smaller blocks, and more bits, with a larger error."""
    families: dict[QuantScheme, list[QuantScheme]] = defaultdict(list)
    for s in d.schemes:
        if not isinstance(s.block, tuple):
            families[replace(s, block=2)].append(s)
    for members in families.values():
        members.sort(key=lambda s: s.block_shape[1])
        for small, large in pairwise(members):
            a, b = d.measured(small).mse, d.measured(large).mse
            if a > b * (1 + TIE):
                yield (
                    f"Finer is worse: {small.scale} has error {percent(a**0.5)} at block {small.block_text} "
                    f"and {percent(b**0.5)} at block {large.block_text}, for fewer bits."
                )
