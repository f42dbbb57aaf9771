# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/which-format.md and the README, made again from nothing.

    python benchmarks/which_format.py [--out docs/images] [--windows 32]

``inversion.png``: the bundled model and a copy of it that computes the same with 16 times narrower
weights, each in every scale and block size, weights and activations quantized. Finished cells are
kept in the cache of ``mxquant sweep``, so that a second run only draws.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from make_narrow_model import make_copy

import mxquant.bundled
from mxquant.analysis.rescale import Moved
from mxquant.evals.sweep.grid import Grid
from mxquant.evals.sweep.inversions import lines_of
from mxquant.evals.sweep.plots import KL, PERPLEXITY, Panel, draw
from mxquant.evals.sweep.report import measured_on, sentences
from mxquant.evals.sweep.run import Done, Sweep, SweepSettings, sweep
from mxquant.evals.text import load_text

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
NARROWER = 16
GRID = Grid(
    scales=("e8m0", "e4m3", "e4m3+global", "ue5m3", "bf16"),
    blocks=(4, 8, 16, 32, 64, 128),
    inputs=("none", "same"),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--windows", type=int, default=32, help="windows of the builtin text (default 32)")
    return parser.parse_args()


def measure(model: Path, windows: int) -> Sweep:
    """A sweep of the whole grid, with a line on standard error for each cell."""

    def tell(done: Done) -> None:
        how = "cached" if done.cached else f"{done.cell.seconds:.1f} s"
        print(f"{model.name}: {done.cell.text} ({how})", file=sys.stderr)

    settings = SweepSettings(windows=windows, batch_size=4, device="cpu")
    return sweep(model, load_text("builtin"), GRID, settings, on_done=tell)


def inversion(out: Path, windows: int) -> None:
    """``inversion.png`` for the README, ``inversion-detail.png`` with KL and weights alone."""
    with tempfile.TemporaryDirectory() as folder:
        moved = make_copy(mxquant.bundled.path(), Path(folder) / "narrow", factor=1 / NARROWER)
        trained, narrow = measure(mxquant.bundled.path(), windows), measure(Path(folder) / "narrow", windows)
    titles = (
        f"as trained (σ ≈ {sigma(moved, 0)})",  # noqa: RUF001
        f"the same model, weights {NARROWER}× narrower (σ ≈ {sigma(moved, 1)})",  # noqa: RUF001
    )
    source = "The model that comes with mxquant" + measured_on(trained)[len(trained.model) :]
    caption = f"{source}\nFP4 elements; scale rule absmax, even for e8m0. {{}}"
    for name, metrics, inputs, what in (
        ("inversion", (PERPLEXITY,), "same", "Weights and activations of all linear layers quantized."),
        ("inversion-weights", (PERPLEXITY, KL), "none", "Weights of all linear layers quantized."),
        ("inversion-activations", (PERPLEXITY, KL), "same", "Weights and activations of all linear layers quantized."),
    ):
        panels = [
            Panel(title, [line for line in lines_of(found.cells) if line.inputs == inputs], found.dense)
            for title, found in zip(titles, (trained, narrow), strict=True)
        ]
        draw(panels, out / f"{name}.png", metrics, caption.format(what))
    for title, found in zip(titles, (trained, narrow), strict=True):
        print(title)
        print("\n".join(f"  {line}" for line in sentences(found)))


def sigma(moved: list[Moved], when: int) -> str:
    """The median standard deviation of the projections, before (0) or after (1)."""
    return f"{statistics.median((m.before, m.after)[when] for m in moved):.2g}"


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    inversion(args.out, args.windows)


if __name__ == "__main__":
    main()
