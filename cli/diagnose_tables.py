"""What ``mxquant diagnose`` prints for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from rich.markup import escape

from mxquant.analysis.advice import budgets
from mxquant.analysis.diagnosis import Diagnosis, Mix, bits_of
from mxquant.analysis.measure import MatrixErrors
from mxquant.cli.common import output_console
from mxquant.presentation.table import Table
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.rules import rules_note

_SIGMA = "\N{GREEK SMALL LETTER SIGMA}"


def print_diagnosis(d: Diagnosis, mix: Mix, advice: list[str], *, per_tensor: bool) -> None:
    """Schemes, weights, errors and the mix as tables; then what follows from them."""
    out = output_console()
    out.print(_about(d), soft_wrap=True)
    out.print(_schemes(d, mix))
    out.print(_tensors(d, mix) if per_tensor else _projections(d))
    if not per_tensor:
        out.print(_errors(d))
    out.print(_mix(d, mix))
    for sentence in advice:
        out.print(f"- {escape(sentence)}", soft_wrap=not out.is_terminal)


def _about(d: Diagnosis) -> str:
    text = (
        f"{d.plan.source}: {len(d.matrices)} linear weights, {d.parameters / 1e6:.1f} of "
        f"{d.plan.parameters / 1e6:.1f} M parameters"
    )
    if d.calibration:
        text += f"; calibrated on {d.calibration.tokens} tokens of {d.calibration.text}"
    return escape(f"{text}. Scale rules: {rules_note(d.schemes)}.")


def _schemes(d: Diagnosis, mix: Mix) -> Table:
    kl = ("KL, nats",) if d.calibration else ()
    columns = ("bits/w", "error", "Gaussian", "MSE ratio", "zero", "subnormal", "saturated", *kl, "best within")
    table = Table.of("Schemes: errors of all weights, and shares of block scales", ("scheme", "rule"), columns)
    best: dict[QuantScheme, list[str]] = {}
    for budget, scheme in budgets(d, mix.budget).items():
        best.setdefault(scheme, []).append(f"{budget:g}")
    for s in sorted(d.schemes, key=d.bits_per_weight):
        m, predicted = d.measured(s), d.predicted_mse(s)
        shares = (m.stats.zero_scales, m.stats.subnormal_scales, m.saturated_scales)
        table.add(
            s.text,
            str(s.scale_rule),
            f"{d.bits_per_weight(s):.3f}",
            _percent(m.mse),
            "" if predicted is None else _percent(predicted),
            "" if not predicted else f"{m.mse / predicted:.3f}",
            *(_share(m.share(count)) for count in shares),
            *([f"{d.total_cost(s):.4f}"] if d.calibration else []),
            ", ".join(best.get(s, [])),
            style="bold" if s in best else "",
        )
    return table


def _projections(d: Diagnosis) -> Table:
    columns = ("matrices", "params", _SIGMA, "kurtosis", f"largest/{_SIGMA}")
    table = Table.of("Weights by projection (least, median, greatest of the matrices)", ("projection",), columns)
    for name, members in d.groups.items():
        sigmas, kurtoses, peaks = (
            [getattr(t.weights, what) for t in members] for what in ("sigma", "kurtosis", "peak")
        )
        table.add(
            name,
            str(len(members)),
            f"{sum(t.parameters for t in members) / 1e6:.2f} M",
            _spread(sigmas, ".3g"),
            _spread(kurtoses, ".2f"),
            _spread(peaks, ".1f"),
        )
    return table


def _errors(d: Diagnosis) -> Table:
    """Errors by projection, and what share of the whole cost it has."""
    what = "error, and share of the expected KL" if d.calibration else "error"
    schemes = sorted(d.schemes, key=d.bits_per_weight)
    table = Table.of(f"By projection: {what}", ("projection",), tuple(s.text for s in schemes))
    for name, members in d.groups.items():
        table.add(name, *(_cell(d, s, members) for s in schemes))
    return table


def _cell(d: Diagnosis, scheme: QuantScheme, matrices: Iterable[MatrixErrors]) -> str:
    matrices = list(matrices)
    error = _percent(d.measured(scheme, matrices).mse)
    if not d.calibration:
        return error
    total = d.total_cost(scheme)
    return f"{error} {sum(d.cost(t, scheme) for t in matrices) / total if total else 0:4.0%}"


def _tensors(d: Diagnosis, mix: Mix) -> Table:
    schemes = sorted(d.schemes, key=d.bits_per_weight)
    columns = (_SIGMA, "kurtosis", f"largest/{_SIGMA}", *(s.text for s in schemes))
    table = Table.of("Weights and errors", ("matrix", "in the mix"), columns)
    for t in d.matrices:
        w = t.weights
        table.add(
            t.name.removesuffix(".weight"),
            mix.chosen[t.tensor.name].text,
            f"{w.sigma:.3g}",
            f"{w.kurtosis:.2f}",
            f"{w.peak:.1f}",
            *(_percent(t.measured[s].mse) for s in schemes),
        )
    return table


def _mix(d: Diagnosis, mix: Mix) -> Table:
    schemes = sorted(set(mix.chosen.values()), key=d.bits_per_weight)
    title = f"Mix for {mix.budget:g} bits per weight"
    table = Table.of(title, ("projection",), (*(s.text for s in schemes), "bits/w"))
    for name, members in d.groups.items():
        counts = Counter(mix.chosen[t.tensor.name] for t in members)
        bits = sum(bits_of(mix.chosen[t.tensor.name], t.tensor.matrix) for t in members)
        average = bits / sum(t.parameters for t in members)
        table.add(name, *(str(counts[s] or "") for s in schemes), f"{average:.3f}")
    return table


def _spread(values: list[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return format(low, form) if len(values) == 1 else " ".join(format(v, form) for v in (low, middle, high))


def _percent(mse: float) -> str:
    """The root of a squared error."""
    return f"{100 * mse**0.5:.2f}%"


def _share(share: float) -> str:
    return f"{share:.2%}" if share else "0"
