# SPDX-License-Identifier: Apache-2.0
"""What each part of the FP4 training recipe of arXiv 2607.24953 is worth: an ablation on the builtin text.

    python benchmarks/fp4_training.py --work out/fp4_training

The bundled model's architecture is trained from scratch in bf16, by the paper's recipe (fp4-2d-qk8), by that
recipe without each of its parts in turn, and by others; every recipe sees the same data from the same start.
A run that is finished is not made again, so the script can be stopped and started. It writes the figures to
benchmarks/results/fp4_training.json and the pictures to docs/images/fp4_training*.png after every run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import torch

from mxquant.evals.models import quiet_transformers
from mxquant.evals.training.initial_model import from_config
from mxquant.evals.training.plots import BASELINE, caption_of, color_of, plot_study
from mxquant.evals.training.study import Plan, Study, run_study
from mxquant.evals.training.summary import Row, baseline_of, rows, to_dict
from mxquant.evals.training.text import load_training_text
from mxquant.presentation import picture
from mxquant.training.recipes import RECIPES, LinearFormats, TrainingRecipe
from mxquant.training.run import RunSettings

HERE = Path(__file__).resolve().parent
PAPER = RECIPES["fp4-2d-qk8"]


def _without_global(formats: LinearFormats) -> LinearFormats:
    return formats.map(lambda role, scheme: replace(scheme, global_scale=False))


# Recipe -> what it is, in the order of the table.
VARIANTS: dict[TrainingRecipe, str] = {
    RECIPES["bf16"]: "baseline",
    PAPER: "the paper's recipe",
    replace(RECIPES["fp4-2d"], name="no-mxfp8"): "without MXFP8 for queries and keys (fp4-2d)",
    PAPER.override(name="no-sr", rounding={"gradient": "nearest"}): "without stochastic rounding",
    PAPER.override(name="no-tf", scale_rule="floor"): "without truncation-free scales",
    PAPER.override(name="no-tiles", block="1x32"): "without tiles: 1-D blocks of 32",
    RECIPES["mxfp4-1d-tf-sr"]: "1-D blocks, truncation-free, stochastic",
    RECIPES["mxfp4-1d"]: "1-D blocks, floor, nearest: naive",
    RECIPES["nvfp4"]: "NVIDIA's: blocks of 16, Hadamard, 2 of 5 blocks high",
    RECIPES["ue5m3-2d"]: "fp4-2d with UE5M3 scales",
    replace(RECIPES["ue5m3-2d"], name="no-global", default=_without_global(RECIPES["ue5m3-2d"].default)): (
        "that without a global scale for gradients"
    ),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("out/fp4_training"), help="folder of the runs")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "fp4_training.json")
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "images" / "fp4_training.png")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=2, help="windows of 512 tokens")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--only", nargs="*", metavar="RECIPE", help="these recipes, beside bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def make_plan(args: argparse.Namespace) -> Plan:
    names = [recipe.name for recipe in VARIANTS]
    if unknown := set(args.only or ()) - set(names):
        raise SystemExit(f"unknown recipe {sorted(unknown)[0]}; choose from {', '.join(names)}")
    chosen = [r for r in VARIANTS if args.only is None or r.name in ("bf16", *args.only)]
    settings = RunSettings(
        steps=args.steps,
        batch_size=args.batch_size,
        lr=args.lr,
        warmup=max(1, args.steps // 20),
        dtype=args.dtype,
        save_every=100,
        monitor_every=max(1, args.steps // 20),
    )
    text = load_training_text("builtin")
    return Plan(from_config(None, None), text, tuple(chosen), settings, seeds=tuple(range(args.seeds)))


def publish(study: Study, args: argparse.Namespace) -> None:
    """Figures and picture of what is finished; curves at every tenth step, as they are long."""
    found = to_dict(study)
    for run in found["runs"]:
        run["curve"] = [row for row in run["curve"] if row["step"] % 10 == 0 or "loss" not in row]
    about = {"what": {r.name: text for r, text in VARIANTS.items()}, "threads": torch.get_num_threads()}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    machine.write_json(args.json, machine.describe() | about | found)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    plot_gaps(study, args.plot, {recipe.name: text for recipe, text in VARIANTS.items()})
    plot_study(study, args.plot.with_stem(f"{args.plot.stem}-curves"))


def plot_gaps(study: Study, path: str | Path, labels: dict[str, str] | None = None) -> None:
    """How far each recipe's final loss is above the baseline's, in percent, with its interval over seeds.

    ``labels``: what to call recipes. Those that always diverged are named without a mark.
    """
    compared = [row for row in rows(study) if row.recipe != baseline_of(study)]
    figure = picture.new_figure(9.5, 1.6 + 0.42 * len(compared))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name, title in zip(axes, ("gap", "eval_gap"), ("training loss", "held-out loss"), strict=True):
        axis.set_title(f"{title} above {baseline_of(study)}, %", fontsize=10)
        axis.axvline(0, color=BASELINE, linewidth=1)
        for y, row in enumerate(compared):
            if (gap := getattr(row, name)) is None:
                continue
            color, half = color_of(study, row.recipe), gap.half_width or 0.0
            picture.draw_interval(axis, (gap.mean - half, gap.mean + half), y, color)
            axis.plot([gap.mean], [y], "o", color=color, markersize=6)
            axis.annotate(
                f"{gap.mean:+.2f}", (gap.mean, y), (0, 6), textcoords="offset points", ha="center", fontsize=8
            )
        picture.style_axis(axis, grid="x", hidden=("top", "right", "left"))
    axes[0].set_yticks(range(len(compared)), [(labels or {}).get(row.recipe, row.recipe) for row in compared])
    axes[0].set_ylim(len(compared) - 0.4, -0.7)
    picture.add_caption(figure, caption_of(study, "Bars: 95 % confidence"))
    picture.save(figure, path)


def print_rows(study: Study) -> None:
    what = {recipe.name: text for recipe, text in VARIANTS.items()}
    header = ["recipe", "runs", "train loss", "gap %", "held-out loss", "gap %", "packed", "mismatch", "s/step"]
    machine.print_table(header, [_cells(row) for row in rows(study)])
    print("\n" + "\n".join(f"{row.recipe}: {what[row.recipe]}" for row in rows(study)))
    for row in rows(study):
        for problem in row.problems:
            print(f"{row.recipe} diverged at {problem}")


def _cells(row: Row) -> list[str]:
    def text(estimate: Any, digits: int, sign: bool = False) -> str:
        return "" if estimate is None else estimate.text(digits, sign)

    return [
        row.recipe,
        str(row.runs),
        text(row.loss, 4),
        text(row.gap, 2, True),
        text(row.eval_loss, 4),
        text(row.eval_gap, 2, True),
        text(row.packed_loss, 4),
        f"{row.monitored['mismatch']:.4f}" if row.monitored else "",
        "" if row.seconds_a_step is None else f"{row.seconds_a_step:.3f}",
    ]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    quiet_transformers(progress_bars=False)
    plan = make_plan(args)
    total = len(plan.recipes) * len(plan.seeds)

    def finished(study: Study) -> None:
        run = study.runs[-1]
        loss = f"loss {run.loss:.4f}, held-out {run.eval_loss:.4f}" if run.problem is None else run.problem
        rate = "" if run.seconds_a_step is None else f", {run.seconds_a_step:.3f} s a step"
        print(f"{len(study.runs)} of {total}: {run.recipe} seed {run.seed}: {loss}{rate}", flush=True)
        publish(study, args)

    study = run_study(plan, args.work, resume=True, finished=finished)
    print_rows(study)


if __name__ == "__main__":
    main()
