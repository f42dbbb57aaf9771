"""A diagnosis as data, for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mxquant.analysis.advice import advice, budgets
from mxquant.analysis.diagnosis import Diagnosis, Mix
from mxquant.analysis.measure import MatrixErrors
from mxquant.convert.pipeline import versions
from mxquant.schemes.formats import QuantScheme


def to_dict(d: Diagnosis, mix: Mix) -> dict[str, Any]:
    """Everything known. Errors are roots of squared error over squared norm; ``cost`` is explained by ``cost_unit``."""
    calibration = d.calibration and {"text": d.calibration.text, "tokens": d.calibration.tokens}
    return {
        "model": str(d.plan.source),
        "parameters": d.plan.parameters,
        "linear_parameters": d.parameters,
        "sample": d.sample,
        "calibration": calibration,
        "cost_unit": "expected KL, nats per token"
        if d.calibration
        else "squared error over squared norm, summed over matrices",
        "versions": versions(),
        "advice": advice(d, mix),
        "schemes": [_scheme(d, s) for s in d.schemes],
        "best": [{"budget": b, "scheme": s.text, "cost": d.total_cost(s)} for b, s in budgets(d, mix.budget).items()],
        "mix": mix.to_dict(),
        "projections": [
            {"projection": name, "matrices": len(members), "errors": _errors(d, members)}
            for name, members in d.groups.items()
        ],
        "matrices": [_matrix(d, t, mix) for t in d.matrices],
    }


def _scheme(d: Diagnosis, scheme: QuantScheme) -> dict[str, Any]:
    figures = _figures(d, scheme, d.matrices)
    return {"scheme": scheme.text, "bits_per_weight": d.bits_per_weight(scheme), **figures, **scheme.to_dict()}


def _matrix(d: Diagnosis, t: MatrixErrors, mix: Mix) -> dict[str, Any]:
    return {
        "name": t.name,
        "shape": list(t.tensor.matrix),
        "dtype": t.tensor.dtype,
        **t.weights.to_dict(),
        "mix": mix.chosen[t.tensor.name].text,
        "errors": _errors(d, [t]),
    }


def _errors(d: Diagnosis, matrices: Iterable[MatrixErrors]) -> dict[str, Any]:
    return {s.text: _figures(d, s, matrices) for s in d.schemes}


def _figures(d: Diagnosis, scheme: QuantScheme, matrices: Iterable[MatrixErrors]) -> dict[str, Any]:
    matrices = list(matrices)
    m, predicted = d.measured(scheme, matrices), d.predicted_mse(scheme, matrices)
    return {
        "relative_error": m.mse**0.5,
        "predicted_relative_error": None if predicted is None else predicted**0.5,
        "zero_scales": m.share(m.stats.zero_scales),
        "subnormal_scales": m.share(m.stats.subnormal_scales),
        "saturated_scales": m.share(m.saturated_scales),
        "saturated_elements": m.stats.saturated / m.stats.elements if m.stats.elements else 0.0,
        "cost": sum(d.cost(t, scheme) for t in matrices),
    }


def headline(d: Diagnosis, mix: Mix) -> str:
    """What a recipe's file says about itself."""
    lines = [
        f"Made by mxquant diagnose for {d.plan.source.name}: {mix.bits_per_weight:.4g} bits per weight",
        f"(budget {mix.budget:g}), global scales not counted.",
    ]
    if d.calibration:
        lines.append(
            f"Expected KL {mix.cost:.3g} nats per token, calibrated on {d.calibration.tokens} tokens of "
            f"{d.calibration.text}."
        )
    else:
        lines.append(f"Mean squared error of the matrices {mix.cost / len(d.matrices):.3g}; not calibrated.")
    best = d.best(mix.budget)
    if best is not None:
        cost = d.total_cost(best) if d.calibration else d.total_cost(best) / len(d.matrices)
        lines.append(f"The best single scheme, {best.text}, has {cost:.3g}.")
    return "\n".join(lines)
