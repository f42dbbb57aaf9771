"""What an evaluation found: one row a model, as JSON and as tables for people."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxquant import __version__
from mxquant.evals import tables
from mxquant.evals.intervals import CONFIDENCE, FEWEST
from mxquant.evals.results import ModelResult
from mxquant.schemes.rules import default_rules_note

if TYPE_CHECKING:
    from mxquant.evals.gate import Gate
    from mxquant.evals.perplexity import Perplexity
    from mxquant.evals.text import EvalText

# Raised when a key of the JSON changes its meaning or goes away; new keys may come at any time.
SCHEMA_VERSION = 1


@dataclass
class Report:
    """All rows of one evaluation, the texts they were measured on and the settings used."""

    results: list[ModelResult]
    texts: Sequence[EvalText] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    gate: Gate | None = None

    @property
    def problems(self) -> list[str]:
        """One line for each model that has no valid perplexity on a text."""
        return [
            f"{row.name}: {found.problem}" + (f" ({text})" if len(self.texts) > 1 else "")
            for row in self.results
            for text, found in row.perplexities.items()
            if found.problem
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without NaN or infinity. Keys are stable within a schema version.

        ``text``, and a model's ``perplexity``, are those of the first of the ``texts``.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "versions": versions(),
            "text": self.texts[0].to_dict() if self.texts else None,
            "texts": [text.to_dict() for text in self.texts],
            "settings": self.settings,
            "models": [row.to_dict() for row in self.results],
            "gate": None if self.gate is None else self.gate.to_dict(),
        }

    def footnote(self) -> str:
        """What the reader of the tables must know, in a few lines."""
        lines = [self.measured_on()]
        found = [p for row in self.results for p in row.perplexities.values()]
        compared = [p.divergence for p in found if p.divergence is not None]
        if compared:
            lines.append(
                f"Ratio, KL and same top-1 are against the baseline; ± is {CONFIDENCE:.0%} confidence, "
                "by bootstrap over (paired) windows."
            )
        if any(divergence.kl_interval is None for divergence in compared):
            lines.append(f"Fewer than {FEWEST} windows have no interval.")
        if any(row.tasks for row in self.results):
            paired = any(row.baseline is not None for row in self.results)
            more = "; that of a difference is of the items' paired differences" if paired else ""
            lines.append(f"± in tasks is one standard error{more}.")
        if any(p.cached for p in found) or any(metric.cached for row in self.results for metric in row.tasks):
            lines.append(f"{tables.CACHED} was measured before and kept in the cache.")
        return "\n".join(line for line in lines if line)

    def measured_on(self) -> str:
        """The texts, the windows and, where schemes are compared, their scale rules, in a few lines."""
        lines = []
        for text in self.texts:
            found = [p for row in self.results if (p := row.perplexities.get(text.name)) and not p.problem]
            if found:
                note = f" ({text.note})" if text.note else ""
                lines += [f"Text {text.name}{note}, sha256 {text.sha256[:16]}.", *_windows(found)]
        if sum(row.bits_per_weight is not None for row in self.results) > 1:
            lines.append(
                f"Scale rules that a scheme does not name are the defaults ({default_rules_note()}), in checkpoints "
                "that mxquant wrote."
            )
        return "\n".join(lines)


def _windows(measured: list[Perplexity]) -> list[str]:
    lines = []
    for windows, seq_len, bos in dict.fromkeys((m.windows, m.seq_len, m.bos) for m in measured):
        after = ", each after a BOS token" if bos else ""
        lines.append(f"{windows} windows of {seq_len} tokens{after}: {windows * (seq_len - 1)} predicted tokens.")
    if len(lines) > 1:
        lines.append("The tokenizers differ, so these perplexities cannot be compared.")
    return lines


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a figure."""
    found: dict[str, str | None] = {"mxquant": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "lm_eval"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
