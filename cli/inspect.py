"""``mxquant inspect``."""

from __future__ import annotations

from typing import Any

import click

from mxquant.cli.common import handle_errors, progress, write_json

_EPILOG = """\b
Examples:
  mxquant inspect ./Llama-3-8B-nvfp4
  mxquant inspect ./Llama-3-8B-nvfp4 model.layers.0.mlp.down_proj
  mxquant inspect openai/gpt-oss-20b --headers-only --json

\b
Supported formats:
  mxquant, compressed-tensors (NVFP4, MXFP4), ModelOpt (NVFP4), Quark (MXFP4, FP4 with
  UE5M3 scales), gpt-oss (MXFP4). Tensors in other formats are listed as stored.
"""


@click.command("inspect", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("path", type=click.Path())
@click.argument("tensor", required=False)
@click.option("--headers-only", is_flag=True, help="Read only the headers: sizes, but no histograms.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@handle_errors
def inspect_command(path: str, tensor: str | None, headers_only: bool, revision: str | None, as_json: bool) -> None:
    """Show what is in the checkpoint PATH, packed or dense: formats, bits per weight, scales, codes.

    PATH is a folder of safetensors or a hub id. Files are memory-mapped and read once. With TENSOR, the name of
    a tensor or layer, the histograms are of that one.

    Shares are of block scales that are zero, subnormal or the largest code, and of elements that are zero or the
    largest code; many of the last mean that blocks saturate. A histogram of scales has a bar for each power of two.
    """
    if tensor is not None and headers_only:
        raise click.UsageError("--headers-only cannot be combined with TENSOR")
    from mxquant.inspection import summary

    checkpoint = summary.open_checkpoint(path, revision=revision)
    if tensor is not None:
        _one(summary.inspect_tensor(checkpoint, tensor), as_json)
        return
    with progress(enabled=not as_json) as display:
        task = display.add_task("Reading", total=None)
        found = summary.inspect_checkpoint(
            checkpoint,
            headers_only=headers_only,
            progress=lambda name, done, total: display.update(task, completed=done, total=total),
        )
    if as_json:
        write_json(found.to_dict())
        return
    from mxquant.cli.inspect_tables import print_inspection

    print_inspection(found)


def _one(found: tuple[Any, Any], as_json: bool) -> None:
    info, content = found
    if as_json:
        header = {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
        kind = "weight" if hasattr(content, "weight") else "values"
        write_json({**header, "file": info.file.name, **({} if content is None else {kind: content.to_dict()})})
        return
    from mxquant.cli.inspect_tables import print_tensor

    print_tensor(info, content)
