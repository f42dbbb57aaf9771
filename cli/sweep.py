"""``mxquant sweep``."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import console, handle_errors, output_console, progress, write_json
from mxquant.cli.options import batch_size_option, check_task_options, loading_options, seq_len_option, task_options
from mxquant.evals.sweep.grid import PAPER, PRESETS, Grid
from mxquant.extras import needs

if TYPE_CHECKING:
    from mxquant.evals.sweep.run import Sweep
    from mxquant.evals.sweep.work import Done

_EPILOG = """\b
Examples:
  mxquant sweep ./model --text notes.txt --output ./sweep
  mxquant sweep ./model --scales e4m3,ue5m3,bf16 --blocks 4,8,16,32 --activations none,same
  mxquant sweep ./model --scales ue5m3 --blocks 16,8x8,32x32 --rules paper,search --tasks piqa
  mxquant sweep ibm-granite/granite-3.3-8b-base --preset is-finer-better --output ./granite
  mxquant sweep ./model --preset is-finer-better --dry-run

\b
Scales: e4m3, ue5m3, e8m0; ue5m3-61440, bf16 and fp32 for studies; +global adds a
global scale for each tensor (e4m3+global is NVFP4's).

\b
Rules: "paper" is absmax, and even for e8m0, as in arXiv 2601.19026; "default" is what
`mxquant quantize` uses; all others by name. A rule that a scale does not have is skipped.

\b
Finished cells are kept in a cache, so a sweep that was interrupted, or gets more scales
or blocks, only measures what is new.
"""

# Where neither an option nor a preset says otherwise.
_SCALES = "e8m0,e4m3,e4m3+global,ue5m3,bf16"
_BLOCKS = "8,16,32,64,128"
_TEXT = "wikitext2"
_WINDOWS = 16


class _Windows(click.ParamType):
    """A number, or ``all``."""

    name = "windows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip().lower()
        if text == "all" or (text.isdigit() and int(text) > 0):
            return text if text == "all" else int(text)
        raise click.BadParameter(f"{value!r} is neither a number of windows nor 'all'", ctx, param)


@click.command("sweep", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("model")
@click.option("--scales", metavar="A,B,...", help=f"Block scale formats; see below.  [default: {_SCALES}]")
@click.option(
    "--blocks", metavar="N|RxC,...", help=f"Blocks along the inputs, tiles of the weights.  [default: {_BLOCKS}]"
)
@click.option("--rules", metavar="A,B,...", help=f"Scale rules; see below.  [default: {PAPER}]")
@click.option("--elements", metavar="A,B,...", help="Element formats.  [default: fp4_e2m1]")
@click.option(
    "--activations",
    metavar="A,B,...",
    help="Inputs of the quantized layers: none, same (as the weights) or a scheme such as ue5m3/16.  [default: none]",
)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Grid, text and windows of a published study.")
@click.option(
    "--text",
    metavar="wikitext2|builtin|FILE",
    help=f"Text for perplexity: WikiText-2's test split, Python's documentation, or a file.  [default: {_TEXT}]",
)
@seq_len_option
@click.option(
    "--windows", type=_Windows(), metavar="N|all", help=f"Use only the first N windows.  [default: {_WINDOWS}]"
)
@batch_size_option
@task_options
@loading_options
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of CUDA devices to use, one model on each.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache folder for finished cells.  [default: ~/.cache/mxquant/sweep]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for sweep.json, sweep.csv, sweep.png and sweep.svg.",
)
@click.option("--dry-run", is_flag=True, help="List the cells and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def sweep_command(model: str, **options: Any) -> None:
    """Evaluate MODEL in many formats: scale x block x rule, with and without quantized activations.

    MODEL is a dense model, a folder or a hub id. It is loaded once; for each cell its linear weights are
    quantized in memory, embeddings, norms and head stay dense. Reports where smaller blocks are worse.
    """
    grid = _grid(options)
    check_task_options(options)
    if options["jobs"] > 1 and options["device"] not in ("auto", "cuda"):
        raise click.UsageError(f"--jobs {options['jobs']} uses CUDA devices and cannot be combined with --device")
    if options["dry_run"]:
        _print_cells(grid, options["as_json"])
        return
    needs("mxquant sweep", "scipy", extra="eval")
    if options["output"] is not None:
        needs("--output", "matplotlib", extra="plot")
    from mxquant.evals.text import load_text

    with console().status("reading the text"):
        text = load_text(options["text"])
    found = _run(model, text, grid, options)
    files = _write(found, options["output"]) if options["output"] is not None else []
    if options["as_json"]:
        write_json(found.to_dict())
        return
    _print(found)
    if files:
        click.echo(f"Wrote {', '.join(map(str, files))}.")


def _grid(options: dict[str, Any]) -> Grid:
    """The grid asked for; what a preset says, and then the defaults, fill ``options`` where they are silent."""
    from mxquant.schemes.formats import parse_block

    preset = PRESETS[options["preset"]] if options["preset"] else None
    base = preset.grid if preset else Grid(tuple(_SCALES.split(",")), tuple(parse_block(b) for b in _BLOCKS.split(",")))
    if options["text"] is None:
        options["text"] = preset.text if preset else _TEXT
    if options["seq_len"] is None and preset:
        options["seq_len"] = preset.seq_len
    if options["windows"] is None:
        options["windows"] = preset.windows if preset else _WINDOWS
    elif options["windows"] == "all":
        options["windows"] = None
    blocks = _list(options, "blocks")
    return Grid(
        scales=_list(options, "scales") or base.scales,
        blocks=tuple(parse_block(block) for block in blocks) or base.blocks,
        rules=_list(options, "rules") or base.rules,
        elements=_list(options, "elements") or base.elements,
        inputs=_list(options, "activations") or base.inputs,
    )


def _list(options: dict[str, Any], name: str) -> tuple[str, ...]:
    """The words of a comma list, each once; empty where the option was not given."""
    if options[name] is None:
        return ()
    words = tuple(dict.fromkeys(word.strip() for word in options[name].split(",") if word.strip()))
    if not words:
        raise click.UsageError(f"--{name} is empty")
    return words


def _print_cells(grid: Grid, as_json: bool) -> None:
    cells, notes = grid.cells()
    if as_json:
        write_json({"cells": [cell.to_dict() for cell in cells], "notes": notes})
        return
    for cell in cells:
        click.echo(cell.text)
    for note in notes:
        click.echo(f"Note: {note}.")
    click.echo(f"{len(cells)} cells, and the dense model.")


def _run(model: str, text: Any, grid: Grid, options: dict[str, Any]) -> Sweep:
    from mxquant.cli.evaluating import prepare_libraries

    prepare_libraries()
    from mxquant.evals.sweep.jobs import cuda_devices
    from mxquant.evals.sweep.run import sweep
    from mxquant.evals.sweep.work import SweepSettings

    devices = cuda_devices(options["jobs"]) if options["jobs"] > 1 else None
    fields = {name: options[name] for name in SweepSettings.__dataclass_fields__}
    display = _Display(1 + len(grid.cells()[0]))
    with display:
        try:
            return sweep(
                model,
                text,
                grid,
                SweepSettings(**fields),
                cache=options["cache"],
                devices=devices,
                on_done=display.done,
                on_progress=display.working,
            )
        except KeyboardInterrupt:
            click.echo(f"{display.finished} cells are kept; run the same command again to continue.", err=True)
            raise


class _Display(contextlib.AbstractContextManager["_Display"]):
    """Progress on standard error: a bar on a terminal, else a line for each finished cell."""

    def __init__(self, total: int):
        self.finished = 0
        self._total, self._measured, self._began = total, 0, time.monotonic()
        self._stack = contextlib.ExitStack()
        self._bar: Any = None

    def __enter__(self) -> _Display:
        if sys.stderr.isatty():
            self._bar = self._stack.enter_context(progress())
            self._task = self._bar.add_task("starting", total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def working(self, what: str, share: float) -> None:
        """Some of the cell in work is done."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=self.finished + share)

    def done(self, done: Done) -> None:
        """A cell is finished."""
        self.finished += 1
        self._measured += not done.cached
        if self._bar is not None:
            self._bar.update(self._task, completed=self.finished)
            return
        from mxquant.evals.sweep.inversions import number

        cell = done.cell
        found = cell.problem or f"perplexity {number(cell.perplexity)}"
        if cell.kl is not None:
            found += f", KL {cell.kl:.4f}"
        when = "cached" if done.cached else f"{cell.seconds:.1f} s"
        if self._measured and self.finished < self._total:
            left = (time.monotonic() - self._began) / self.finished * (self._total - self.finished)
            when += f", about {left:.0f} s left"
        click.echo(f"[{self.finished}/{self._total}] {cell.text}: {found} ({when})", err=True)


def _write(found: Sweep, folder: Path) -> list[Path]:
    """JSON, CSV and pictures of a sweep."""
    from mxquant.evals.sweep.plots import plot_sweep
    from mxquant.evals.sweep.tables import measured_on, to_csv

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"sweep.{kind}" for kind in ("json", "csv", "png", "svg")]
    write_json(found.to_dict(), files[0])
    files[1].write_text(to_csv(found))
    for picture in files[2:]:
        plot_sweep(found, picture, measured_on(found))
    return files


def _print(found: Sweep) -> None:
    from mxquant.evals.sweep.tables import sentences, tables

    output_console().print(*tables(found))
    for line in sentences(found):
        click.echo(line)
