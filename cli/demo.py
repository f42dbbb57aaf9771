"""``mxquant demo``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import handle_errors, write_json
from mxquant.cli.evaluating import prepare_libraries, print_tables, stage
from mxquant.extras import needs

if TYPE_CHECKING:
    from mxquant.evals.models import EvalModel
    from mxquant.evals.report import Report
    from mxquant.schemes.formats import QuantScheme

_EPILOG = """\b
Example:
  mxquant demo --out ./mxquant-demo
"""

_PROMPT = "Return a list of"
_SAMPLE_TOKENS = 60

# Enough for intervals that tell the schemes apart, and for less than a minute on two cores.
_WINDOWS = 32


@click.command("demo", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="mxquant-demo",
    show_default=True,
    help="Folder for the quantized models and the picture; those of an earlier demo are replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def demo_command(out: Path, as_json: bool) -> None:
    """Quantize a small bundled model in four formats, evaluate and compare.

    Needs neither network nor GPU, and takes less than a minute on two cores. The model is a small
    one, trained on Python's documentation; the text it is evaluated on was held out.
    """
    needs("mxquant demo", "scipy", "matplotlib", extra="eval,plot")
    prepare_libraries()
    from mxquant.evals.plots import plot_comparison

    folders = _quantize(out)
    report = _evaluate(folders)
    picture = out / "demo.png"
    plot_comparison(report.results, picture, report.measured_on())
    samples = _samples({"dense": _bundled(), "fp4-ue5m3-b16": folders[0]})
    if as_json:
        write_json(report.to_dict() | {"samples": samples, "prompt": _PROMPT, "picture": str(picture)})
        return
    print_tables(report)
    click.echo(f"(The first {_WINDOWS} windows only; `mxquant eval --text builtin` uses all of them.)")
    for name, text in samples.items():
        click.echo(f"\nA sample from {name}:\n{textwrap.indent(text, '    ')}")
    click.echo(f"\nWrote {picture} and the models next to it. To try your own:")
    click.echo("  mxquant quantize MODEL --scale ue5m3 --block 16")


def _bundled() -> Path:
    import mxquant.bundled

    return mxquant.bundled.path()


def _schemes() -> list[QuantScheme]:
    from mxquant.schemes.formats import QuantScheme

    preset = QuantScheme.preset
    return [QuantScheme(scale="ue5m3", block=16), preset("mxfp4"), preset("nvfp4"), QuantScheme(scale="e4m3", block=16)]


def _quantize(out: Path) -> list[Path]:
    import mxquant

    schemes = _schemes()
    folders = [out / scheme.name for scheme in schemes]
    out.mkdir(parents=True, exist_ok=True)
    with stage("quantizing") as progress:
        for done, (scheme, folder) in enumerate(zip(schemes, folders, strict=True)):
            progress(done, len(schemes))
            mxquant.quantize_model(_bundled(), folder, scheme, overwrite=True)
    return folders


def _evaluate(folders: list[Path]) -> Report:
    from mxquant.evals.find_model import find_model
    from mxquant.evals.report import Report
    from mxquant.evals.run import run
    from mxquant.evals.settings import EvalSettings
    from mxquant.evals.text import load_text

    report = Report([], [load_text("builtin")])
    baseline = find_model(_bundled(), label="bundled model")
    sources = [find_model(folder) for folder in folders]
    run(report, sources, EvalSettings(windows=_WINDOWS, device="cpu"), baseline=baseline, stage=stage)
    return report


def _samples(folders: dict[str, Path]) -> dict[str, str]:
    """The same prompt continued by each model, with the same random numbers."""
    from mxquant.evals.models import load_model

    return {name: _generate(load_model(folder, device="cpu")) for name, folder in folders.items()}


def _generate(model: EvalModel) -> str:
    import torch

    inputs: Any = model.tokenizer(_PROMPT, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    torch.manual_seed(0)
    with torch.inference_mode():
        tokens = model.model.generate(
            **inputs, max_new_tokens=_SAMPLE_TOKENS, do_sample=True, temperature=0.5, top_k=20, pad_token_id=0
        )
    return model.tokenizer.decode(tokens[0], skip_special_tokens=True)
