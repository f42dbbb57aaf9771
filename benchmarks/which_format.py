# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/which-format.md and the README, made again from nothing.

    python benchmarks/which_format.py [--out docs/images] [--windows 32]

``inversion.png``: the bundled model and a copy of it that computes the same with 16 times narrower
weights, each in every scale and block size, weights and activations quantized; two more with KL, and
for weights alone. Finished cells are kept in the cache of ``mxquant sweep``, so that a second run only
draws. ``theory.png`` and ``theory-parts.png``: expected errors of Gaussian weights. ``diagnosis.png``: what
``mxquant diagnose`` sees in the narrow copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from make_narrow_model import make_copy
from rescale import Moved

import mxquant.bundled
from mxquant.analysis.examine import examine, prepare
from mxquant.evals.diagnose_plots import plot_diagnosis
from mxquant.evals.sweep.grid import Grid
from mxquant.evals.sweep.inversions import lines_of
from mxquant.evals.sweep.plots import KL, PERPLEXITY, Panel, draw
from mxquant.evals.sweep.run import Sweep, sweep
from mxquant.evals.sweep.tables import measured_on, sentences, to_csv
from mxquant.evals.sweep.work import Done, SweepSettings
from mxquant.evals.text import load_text
from mxquant.evals.theory_plots import plot_error_curves, plot_parts
from mxquant.evals.theory_study import study
from mxquant.schemes.formats import QuantScheme

RESULTS = Path(__file__).resolve().parent / "results"
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


def inversion(out: Path, windows: int, copy: Path, moved: list[Moved]) -> None:
    """``inversion.png`` for the README, two more with KL, of weights alone and with activations."""
    trained, narrow = measure(mxquant.bundled.path(), windows), measure(copy, windows)
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
    for name, title, found in zip(("bundled", "bundled-narrow"), titles, (trained, narrow), strict=True):
        (RESULTS / f"sweep-{name}.csv").write_text(to_csv(found))
        print(title)
        print("\n".join(f"  {line}" for line in sentences(found)))


def expected(out: Path) -> None:
    """``theory.png``: error against sigma. ``theory-parts.png``: what it consists of."""
    schemes = [QuantScheme.parse(f"{scale}/{block}/absmax") for scale in ("e4m3", "ue5m3") for block in (8, 16, 32)]
    sigmas = [10 ** (-5 + 6 * i / 399) for i in range(400)]
    report = study(schemes, sigmas, span=(sigmas[0], sigmas[-1]))
    title, caption = "Expected error of Gaussian weights", "\n".join(report.notes())
    crossings = report.crossovers or ()
    plot_error_curves(report.curves, out / "theory.png", crossovers=crossings, title=title, caption=caption)
    chosen = [QuantScheme.parse(f"{scale}/8/absmax") for scale in ("e4m3", "ue5m3")]
    parts = study(chosen, [10 ** (-3 + 3 * i / 299) for i in range(300)])
    plot_parts(parts.curves, out / "theory-parts.png", title="What the error consists of", caption=caption)


def diagnosis(out: Path, copy: Path) -> None:
    """``diagnosis.png``: the maps that ``mxquant diagnose`` draws of the narrow copy."""
    schemes = [QuantScheme.parse(text) for text in ("e4m3/8/absmax", "e4m3/16/absmax", "ue5m3/16", "ue5m3/8", "mxfp4")]
    found = examine(prepare(copy, schemes))
    plot_diagnosis(found, found.mix(4.5), out / "diagnosis.png")


def sigma(moved: list[Moved], when: int) -> str:
    """The median standard deviation of the projections, before (0) or after (1)."""
    return f"{statistics.median((m.before, m.after)[when] for m in moved):.2g}"


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    expected(args.out)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "narrow"
        moved = make_copy(mxquant.bundled.path(), copy, factor=1 / NARROWER)
        diagnosis(args.out, copy)
        inversion(args.out, args.windows, copy, moved)


if __name__ == "__main__":
    main()
