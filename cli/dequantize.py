"""``mxquant dequantize``."""

from __future__ import annotations

from pathlib import Path

import click

from mxquant.cli.common import handle_errors, printable, progress

_EPILOG = """\b
Example:
  mxquant dequantize ./Llama-3-8B-fp4-ue5m3-b16 ./Llama-3-8B-dense --dtype float32
"""


@click.command("dequantize", epilog=_EPILOG)
@click.argument("path")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Dtype of the weights that were quantized.  [default: the model's]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing model in the output folder.")
@handle_errors
def dequantize_command(path: str, out: Path, dtype: str | None, overwrite: bool) -> None:
    """Convert the quantized checkpoint PATH to a dense one in OUT.

    Reads mxquant's own format, compressed-tensors' NVFP4 and MXFP4, ModelOpt's NVFP4, Quark's FP4 and gpt-oss's MXFP4.
    """
    import torch

    from mxquant.convert.dequantize import dequantize_model

    with progress() as display:
        task = display.add_task("Dequantizing", total=None)
        dequantize_model(
            path,
            out,
            dtype=getattr(torch, dtype) if dtype else None,
            overwrite=overwrite,
            progress=lambda name, count: display.advance(task, count),
            notify=lambda text: click.echo(f"Warning: {printable(text)}", err=True),
        )
    click.echo(f"Wrote {out}")
