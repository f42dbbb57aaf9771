"""What ``mxquant train`` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mxquant.cli.common import human_bytes, output_console
from mxquant.evals.training.study import Study, perplexity
from mxquant.evals.training.summary import Estimate, baseline_of, rows
from mxquant.presentation.table import Table
from mxquant.training.cost import ASSUMPTIONS

if TYPE_CHECKING:
    from mxquant.training.cost import Component, Cost


def print_costs(model: str, costs: list[Cost]) -> None:
    """Memory by component and theoretical speed-up, and what they assume."""
    for cost in costs:
        table = Table.of(f"{model} under {cost.recipe}", ("weights",), ("params", "bf16", "becomes", "block scales"))
        parts: list[tuple[str, Component | Cost]] = [(part.name, part) for part in cost.components]
        for name, part in [*parts, ("total", cost)]:
            table.add(
                name,
                f"{part.parameters / 1e6:,.1f} M",
                _megabytes(part.bytes_before),
                _megabytes(part.bytes_after),
                human_bytes(part.scale_bytes),
                style="bold" if part is cost else "",
            )
        output_console().print(table)
        click.echo(
            f"Weights {_megabytes(cost.bytes_before)} -> {_megabytes(cost.bytes_after)} ({cost.saved:.1%} less), "
            f"theoretical speed-up of linear layers {cost.speedup:.2f}x, "
            f"{human_bytes(cost.state_bytes)} of master weights, gradients and optimizer state.\n"
        )
    click.echo("Assumed:\n" + "\n".join(f"- {line}" for line in ASSUMPTIONS))


def print_study(study: Study) -> None:
    """One row a recipe, and what was measured."""
    baseline, several = baseline_of(study), len(study.plan.seeds) > 1
    gaps = () if baseline is None else ("gap %", "gap held-out %")
    columns = ("train loss", "held-out loss", *gaps, "perplexity", "packed", "saturated", "mismatch", "s/step")
    table = Table.of("Training", ("recipe",), columns)
    for row in rows(study):
        monitored = row.monitored
        table.add(
            row.recipe,
            _text(row.loss, 4),
            _text(row.eval_loss, 4),
            *([] if baseline is None else [_text(row.gap, 2, sign=True), _text(row.eval_gap, 2, sign=True)]),
            _perplexity(row.eval_loss),
            _perplexity(row.packed_loss),
            f"{monitored['saturated']:.1%}" if monitored else "",
            f"{monitored['mismatch']:.4f}" if monitored else "",
            "" if row.seconds_a_step is None else f"{row.seconds_a_step:.3f}",
        )
    output_console().print(table)
    for row in rows(study):
        for problem in row.problems:
            click.echo(f"{row.recipe} diverged at {problem}.")
    settings = study.plan.settings
    click.echo(
        f"{study.plan.source.name}: {study.parameters:,} parameters, {settings.steps} steps of "
        f"{study.tokens_a_step():,} tokens from {study.plan.text.name} ({study.train_tokens:,} tokens), "
        f"held out {study.eval_tokens:,} of {study.plan.text.heldout.name}; {len(study.plan.seeds)} seed"
        f"{'s, with 95 % confidence' if several else ''}.\n"
        "Train loss: mean of the last tenth. Perplexity: held-out, as in training; packed: weights quantized, "
        "activations not."
    )
    for name, metrics in study.tasks.items():
        click.echo(f"{name}: " + ", ".join(f"{m.task} {m.name} {m.value:.4f}" for m in metrics))


def _text(estimate: Estimate | None, digits: int, sign: bool = False) -> str:
    return "" if estimate is None else estimate.text(digits, sign)


def _perplexity(loss: Estimate | None) -> str:
    value = None if loss is None else perplexity(loss.mean)
    return "" if value is None else f"{value:.2f}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
