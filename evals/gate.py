"""Limits on what quantization may cost: each model passes or fails.

The estimate itself is compared with the limit, not an end of its interval. A figure that is missing
or no number fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxquant.errors import MXQuantError

if TYPE_CHECKING:
    from mxquant.evals.results import ModelResult


def parse_share(text: str) -> float:
    """``5%`` or ``0.05`` as 0.05. Raises ``MXQuantError`` where it is neither, or could be taken for the other."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    if found is None:
        raise MXQuantError(f"{text!r} is not a share; write 5% or 0.05")
    number = float(found[1])
    if found[2]:
        return number / 100
    if number >= 1:
        raise MXQuantError(f"{text!r} may mean {number:g}% or {100 * number:g}%; write the percent sign")
    return number


@dataclass(frozen=True)
class Limits:
    """What is allowed at most, against the baseline; None: anything.

    ``ppl_increase``: of the perplexity, as a share. ``kl``: nats a token. ``accuracy_drop``: of every
    metric of a task where more is better, absolute: 0.01 is a point of an accuracy in percent.
    """

    ppl_increase: float | None = None
    kl: float | None = None
    accuracy_drop: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return {
            "max_ppl_increase": self.ppl_increase,
            "max_kl": self.kl,
            "max_accuracy_drop": self.accuracy_drop,
        }


@dataclass(frozen=True)
class Check:
    """One figure of one model against its limit; ``measured`` is None where there is no figure."""

    model: str
    figure: str
    on: str
    measured: float | None
    limit: float
    is_share: bool = True

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.measured <= self.limit

    @property
    def measured_text(self) -> str:
        return "none" if self.measured is None else self._text(self.measured)

    @property
    def limit_text(self) -> str:
        return self._text(self.limit)

    def _text(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.is_share else f"{value:.4g}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "figure": self.figure,
            "on": self.on,
            "measured": self.measured,
            "limit": self.limit,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Gate:
    """Every check of an evaluation."""

    limits: Limits
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all did; an evaluation in which nothing could be checked does not."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """A line for each check that failed, or that there was none."""
        if not self.checks:
            return ["the gate found nothing to check"]
        return [
            f"{check.model} fails the gate on {check.on}: {check.figure} {check.measured_text}, "
            f"at most {check.limit_text} allowed"
            for check in self.checks
            if not check.passed
        ]

    def to_dict(self) -> dict[str, Any]:
        checks = [check.to_dict() for check in self.checks]
        return {"passed": self.passed, "limits": self.limits.to_dict(), "checks": checks}


def check(limits: Limits, results: Iterable[ModelResult], texts: Iterable[str]) -> Gate:
    """Check every model but the baseline, on every text (by name) and task."""
    names, rows = list(texts), [row for row in results if not row.is_baseline]
    return Gate(limits, tuple(one for row in rows for one in _checks(limits, row, names)))


def _checks(limits: Limits, row: ModelResult, texts: list[str]) -> Iterator[Check]:
    for text in texts:
        found = row.perplexities.get(text)
        against = None if found is None else found.divergence
        if limits.ppl_increase is not None:
            increase = None if against is None else _number(against.ratio - 1)
            yield Check(row.name, "perplexity increase", text, increase, limits.ppl_increase)
        if limits.kl is not None:
            kl = None if against is None else _number(against.kl)
            yield Check(row.name, "KL, nats", text, kl, limits.kl, is_share=False)
    if limits.accuracy_drop is not None:
        for metric in row.tasks if row.baseline is None else row.baseline.tasks:
            if metric.higher_is_better:
                own = row.metric(metric.task, metric.name)
                difference = None if own is None else row.difference(own)
                drop = None if difference is None else _number(0.0 - difference.value)
                yield Check(row.name, f"drop of {metric.name}", metric.task, drop, limits.accuracy_drop)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
