"""``mxquant theory``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import handle_errors, progress, write_json
from mxquant.schemes.formats import ELEMENTS, ROUNDINGS, QuantScheme

if TYPE_CHECKING:
    from mxquant.evals.theory_study import TheoryReport

_EPILOG = """\b
Examples:
  mxquant theory --scales e4m3,ue5m3 --blocks 8,16,32 --sigma 0.02
  mxquant theory --scales e4m3,ue5m3,e4m3+global --sigma 1e-5:10 --crossovers --plot curves.png
  mxquant theory --scales e4m3 --blocks 8,16 --sigma 1e-3:1 --plot-parts parts.svg
  mxquant theory --scales nvfp4,mxfp4,ue5m3/16/search --distribution student-t:5 --json
"""
_BLOCKS = "8,16,32"
# Points of a range: rows of a table; a drawn curve, with the waves of power-of-two scales; one that is sampled.
_ROWS, _POINTS, _SAMPLED_POINTS = 13, 400, 60


@click.command("theory", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.option(
    "--scales", default="e4m3,ue5m3", show_default=True, metavar="S,S,...", help="Scale formats, or schemes as text."
)
@click.option("--blocks", metavar="N,RxC,...", help=f"Blocks and tiles.  [default: {_BLOCKS}, or a scheme's own]")
@click.option(
    "--sigma",
    default="0.02",
    show_default=True,
    metavar="S,S,...|LOW:HIGH",
    help="Standard deviations of the weights, or a range.",
)
@click.option(
    "--points", type=click.IntRange(2, 10000), help=f"Number of points in a range.  [default: {_POINTS} where drawn]"
)
@click.option(
    "--distribution", default="gaussian", show_default=True, help="gaussian, laplace, uniform or student-t:DF."
)
@click.option("--element", type=click.Choice(list(ELEMENTS)), help="Element format.  [default: fp4_e2m1]")
@click.option("--rule", help="Scale rule.  [default: absmax, and even for e8m0; a scheme's own]")
@click.option("--rounding", type=click.Choice(ROUNDINGS), help="Rounding of elements.  [default: nearest]")
@click.option(
    "--metric", type=click.Choice(["squared", "absolute"]), default="squared", show_default=True, help="Kind of error."
)
@click.option(
    "--tensor-elements",
    type=click.IntRange(2),
    default=1 << 24,
    show_default=True,
    help="Size of the tensor whose largest weight sets the global scale.",
)
@click.option("--crossovers", is_flag=True, help="Find every sigma at which neighbouring block sizes change order.")
@click.option("--plot", type=click.Path(path_type=Path), help="Plot the error over sigma: .png, .pdf or .svg.")
@click.option("--plot-parts", type=click.Path(path_type=Path), help="Plot the parts of the error.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write all points to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def theory_command(**options: Any) -> None:
    """Compute the expected error of a scheme on weights of a given width; no model is needed.

    Errors are means over elements, relative to sigma^2 (absolute ones to sigma): 1 means that all is lost. Their
    parts are the elements that are not the largest of their block, the largest ones, and blocks whose scale is
    zero. Rules that look at the whole block (search, four-over-six) are sampled; their standard error is given.

    Crossovers are looked for, and curves drawn, over the range given as --sigma, or over 1e-5:10.
    """
    from mxquant import theory
    from mxquant.cli.theory_tables import print_theory
    from mxquant.evals.theory_study import steps, study
    from mxquant.presentation.picture import check_format

    drawn = [path for path in (options["plot"], options["plot_parts"]) if path]
    for path in drawn:
        check_format(path)
    for path in [*drawn, *filter(None, [options["csv_path"]])]:
        if not path.parent.is_dir():
            raise click.UsageError(f"there is no folder {path.parent} to write {path.name} to")
    numbers, is_range = _numbers(options["sigma"])
    if drawn and not is_range:
        raise click.UsageError("a picture needs a range of sigma, such as --sigma 1e-4:1")
    schemes = _schemes(options)
    common = {name: options[name] for name in ("distribution", "metric", "tensor_elements")}
    common["distribution"] = theory.distribution_of(options["distribution"]).text
    sigmas = _spread(numbers, options["points"] or _points(schemes, bool(drawn))) if is_range else numbers
    span = (sigmas[0], sigmas[-1]) if is_range else (theory.LOW, theory.HIGH)
    wanted = span if options["crossovers"] else None
    total = steps(schemes, sigmas, options["crossovers"])
    with progress(enabled=total > 50) as display:
        task = display.add_task("Errors", total=total)
        report = study(schemes, sigmas, **common, span=wanted, advance=lambda: display.advance(task))
    if options["csv_path"]:
        report.write_csv(options["csv_path"])
    _draw(report, options)
    if options["as_json"]:
        write_json(report.to_dict())
        return
    print_theory(report, as_curves=is_range)


def _schemes(options: dict[str, Any]) -> list[QuantScheme]:
    """Every scale with every block; a full scheme keeps its own block unless blocks are given."""
    from mxquant import theory
    from mxquant.schemes.formats import parse_block

    changes = {name: options[name] for name in ("element", "rule", "rounding")}
    schemes = []
    for text in _parts(options["scales"], "--scales"):
        blocks = options["blocks"] or (_BLOCKS if theory.is_bare_scale(text) else "")
        for block in [parse_block(b) for b in _parts(blocks, "--blocks")] if blocks else [None]:
            schemes.append(theory.scheme_of(text, block=block, **changes))
    return list(dict.fromkeys(schemes))


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise click.BadParameter(f"{text!r} contains an empty item", param_hint=option)
    return parts


def _numbers(text: str) -> tuple[list[float], bool]:
    """The numbers typed as --sigma, ascending, and whether they are the ends of a range."""
    is_range = ":" in text
    try:
        numbers = [float(part) for part in text.split(":" if is_range else ",")]
    except ValueError:
        numbers = []
    positive = numbers and all(0 < s < math.inf for s in numbers)
    if not positive or (is_range and not (len(numbers) == 2 and numbers[0] < numbers[1])):
        hint = "positive numbers such as 0.02 or 0.01,0.02, nor an ascending range such as 1e-5:10"
        raise click.BadParameter(f"{text!r} is neither {hint}", param_hint="--sigma")
    return sorted(set(numbers)), is_range


def _points(schemes: list[QuantScheme], drawn: bool) -> int:
    from mxquant.theory import is_sampled

    return (_SAMPLED_POINTS if any(map(is_sampled, schemes)) else _POINTS) if drawn else _ROWS


def _spread(ends: list[float], points: int) -> list[float]:
    """Evenly over the logarithms, the ends exactly."""
    step = math.log(ends[1] / ends[0]) / (points - 1)
    return [ends[0], *(ends[0] * math.exp(i * step) for i in range(1, points - 1)), ends[1]]


def _draw(report: TheoryReport, options: dict[str, Any]) -> None:
    from mxquant.evals.theory_plots import plot_error_curves, plot_parts

    texts = {"metric": options["metric"], "caption": "\n".join(report.notes())}
    title = f"Expected error of {report.weights} weights"
    if options["plot"]:
        plot_error_curves(report.curves, options["plot"], crossovers=report.crossovers or (), title=title, **texts)
    if options["plot_parts"]:
        plot_parts(report.curves, options["plot_parts"], title=title, **texts)
