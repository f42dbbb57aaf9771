"""``mxquant diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.analysis.defaults import BUDGET, SCHEMES
from mxquant.cli.common import console, handle_errors, progress, write_json
from mxquant.cli.options import loading_options
from mxquant.extras import needs
from mxquant.schemes.formats import PRESETS, QuantScheme, scale_rules, scheme_fields

if TYPE_CHECKING:
    from mxquant.analysis.diagnosis import Diagnosis, Mix
    from mxquant.analysis.examine import Subject
    from mxquant.analysis.sensitivity import Calibration
    from mxquant.evals.text import EvalText

_EPILOG = f"""\b
Examples:
  mxquant diagnose meta-llama/Llama-3-8B
  mxquant diagnose ./model --budget 4.5 --calibration notes.txt --recipe-out mix.yaml --plot mix.png
  mxquant quantize ./model --recipe mix.yaml
  mxquant diagnose ./model --schemes e4m3/8,e4m3/16,ue5m3/8,ue5m3/16 --rule absmax --json
  mxquant diagnose ./large-model --sample 0.1

\b
Schemes are written as in recipes: scale/block, with a rule, an element or +global where
wanted (e4m3+global/8/absmax), or a preset ({", ".join(PRESETS)}). By default:
{", ".join(SCHEMES)}.
"""


@click.command("diagnose", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("model")
@click.option("--schemes", metavar="A,B,...", help="Schemes to measure.  [default: see below]")
@click.option(
    "--rule", type=click.Choice(scale_rules()), help="Scale rule for schemes that do not name one, where it applies."
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=BUDGET,
    show_default=True,
    help="Bits per weight for the mix of schemes, block scales included.",
)
@click.option(
    "--calibration",
    metavar="builtin|wikitext2|FILE",
    help="Text for estimating the model's sensitivity to errors in each weight; runs it forward and backward.",
)
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    help="Windows of the calibration text to use.  [default: 8]",
)
@click.option("--seq-len", type=click.IntRange(min=2), help="Tokens per calibration window.  [default: 512]")
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Fraction of the rows to read.  [default: all]",
)
@click.option(
    "--include", multiple=True, metavar="REGEX", help="Analyze only matching modules; may name the output head."
)
@click.option("--exclude", multiple=True, metavar="REGEX", help="Keep matching modules dense.")
@click.option("--recipe-out", type=click.Path(path_type=Path), help="Write the mix as a recipe for `mxquant quantize`.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Plot maps of layers and projections: .png, .pdf or .svg."
)
@click.option("--per-tensor", is_flag=True, help="Print a table with one row per matrix.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@loading_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def diagnose_command(model: str, **options: Any) -> None:
    """Recommend number formats for MODEL, and estimate the error of each.

    Streams the linear weights of a folder of safetensors or a hub id: width, tails and outliers of each matrix,
    measured errors of a list of schemes beside those of Gaussian weights, the best schemes for a budget of bits.
    The model does not run unless --calibration is given.
    """
    schemes = _schemes(options)
    _check(options)
    text = _text(options["calibration"])
    from mxquant.analysis.advice import advice
    from mxquant.analysis.diagnosis import check_budget
    from mxquant.analysis.examine import prepare

    with console().status("reading the headers"):
        subject = prepare(
            model,
            schemes or [_with_rule(s, options["rule"]) for s in SCHEMES],
            include=tuple(options["include"]),
            exclude=tuple(options["exclude"]),
            trust_remote_code=options["trust_remote_code"],
            revision=options["revision"],
        )
    check_budget(options["budget"], subject.schemes, subject.plan.quantized)
    diagnosis = _measure(subject, _calibrate(subject, text, options) if text else None, options)
    mix = diagnosis.mix(options["budget"])
    written = _write(diagnosis, mix, options)
    if options["as_json"]:
        from mxquant.analysis.export import to_dict

        write_json(to_dict(diagnosis, mix))
        return
    from mxquant.cli.diagnose_tables import print_diagnosis

    print_diagnosis(diagnosis, mix, advice(diagnosis, mix), per_tensor=options["per_tensor"])
    for path in written:
        click.echo(f"Wrote {path}.")


def _schemes(options: dict[str, Any]) -> list[QuantScheme]:
    """Those of ``--schemes``; none without it."""
    if options["schemes"] is None:
        return []
    texts = [text.strip() for text in options["schemes"].split(",")]
    if not all(texts):
        raise click.BadParameter(f"{options['schemes']!r} contains an empty item", param_hint="--schemes")
    return [_with_rule(text, options["rule"]) for text in texts]


def _with_rule(text: str, rule: str | None) -> QuantScheme:
    """The scheme of a text, with ``rule`` where the text names no rule and its scale has it."""
    scheme = QuantScheme.parse(text)
    if rule is None or "scale_rule" in scheme_fields(text) or rule not in scheme.scale_format.rules:
        return scheme
    return scheme.merge(scale_rule=rule)


def _check(options: dict[str, Any]) -> None:
    """What can be known to be wrong before anything is read."""
    needs("mxquant diagnose", "scipy", extra="theory")
    if options["calibration"] is None:
        for name in ("windows", "seq_len"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} requires --calibration")
    for name in ("recipe_out", "plot"):
        path, option = options[name], f"--{name.replace('_', '-')}"
        if path is not None and path.is_dir():
            raise click.UsageError(f"{option} {path} is a folder; give a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{option} {path}: there is no folder {path.parent}")
    if options["plot"] is not None:
        from mxquant.presentation.picture import check_format

        check_format(options["plot"])


def _text(name: str | None) -> EvalText | None:
    from mxquant.errors import MXQuantError
    from mxquant.evals.text import load_text

    if name is None:
        return None
    try:
        with console().status("reading the text"):
            return load_text(name)
    except MXQuantError as error:  # which speaks of the option of other commands
        raise MXQuantError(str(error).replace("--text", "--calibration")) from error


def _calibrate(subject: Subject, text: EvalText, options: dict[str, Any]) -> Calibration:
    from mxquant.cli.evaluating import prepare_libraries, stage

    prepare_libraries()
    from mxquant.errors import MXQuantError
    from mxquant.evals.calibration import WINDOWS, calibrate
    from mxquant.evals.models import load_model

    source = subject.checkpoint.source
    if subject.checkpoint.folder != source:
        raise MXQuantError(f"--calibration cannot run GGUF files; have transformers save {source} as safetensors first")
    with stage(f"loading {subject.checkpoint.folder.name}"):
        loaded = load_model(
            subject.checkpoint.folder,
            dtype=options["dtype"],
            device=options["device"],
            trust_remote_code=options["trust_remote_code"],
        )
    with stage("calibrating") as report:
        return calibrate(
            loaded,
            text,
            subject.plan.quantized,
            windows=options["windows"] or WINDOWS,
            seq_len=options["seq_len"],
            progress=report,
        )


def _measure(subject: Subject, calibration: Calibration | None, options: dict[str, Any]) -> Diagnosis:
    from mxquant.analysis.examine import examine

    with progress(enabled=not options["as_json"]) as display:
        task = display.add_task("Measuring", total=subject.weights * options["sample"])
        return examine(
            subject,
            calibration=calibration,
            sample=options["sample"],
            progress=lambda weights: display.advance(task, weights),
        )


def _write(diagnosis: Diagnosis, mix: Mix, options: dict[str, Any]) -> list[Path]:
    written = []
    if options["recipe_out"] is not None:
        from mxquant.analysis.export import headline
        from mxquant.analysis.recipes import to_yaml

        options["recipe_out"].write_text(to_yaml(mix.recipe, headline(diagnosis, mix)))
        written.append(options["recipe_out"])
    if options["plot"] is not None:
        from mxquant.evals.diagnose_plots import plot_diagnosis

        plot_diagnosis(diagnosis, mix, options["plot"])
        written.append(options["plot"])
    return written
