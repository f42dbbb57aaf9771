"""``mxquant verify``."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from mxquant.cli.common import handle_errors, progress, write_json
from mxquant.inspection.faults import KINDS

if TYPE_CHECKING:
    from mxquant.inspection.faults import Verification

# Faults of one kind that are printed; the JSON has them all.
_SHOWN = 8

_EPILOG = (
    """\b
Examples:
  mxquant verify ./Llama-3-8B-nvfp4
  mxquant verify ./Llama-3-8B-nvfp4 --source meta-llama/Llama-3-8B
  mxquant verify ./Llama-3-8B-nvfp4 --source ./Llama-3-8B --all --json

\b
Exit codes (with several kinds of faults, the first of these):
   0  no faults
   1  nothing could be verified: no such folder, an unsupported format
   2  usage error
"""
    + "\n".join(f"  {kind.code}  {name}: {kind.what}" for name, kind in KINDS.items())
    + "\n"
)


@click.command("verify", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("path", type=click.Path())
@click.option("--source", metavar="DENSE", type=click.Path(), help="Dense source model to compare with.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Number of layers to compare with DENSE.",
)
@click.option("--all", "everything", is_flag=True, help="Compare every layer with DENSE, each expert too.")
@click.option(
    "--load/--no-load",
    default=None,
    help="Load it with transformers, compare what is loaded with the files, and run a few tokens. By default if "
    "nothing else is wrong and it needs at most half of the available memory.",
)
@click.option("--trust-remote-code", is_flag=True, help="Allow running code that comes with the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@handle_errors
def verify_command(
    path: str,
    source: str | None,
    sample: int,
    everything: bool,
    load: bool | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Check the checkpoint PATH, packed or dense, for faults.

    Files, index, config, shapes and every scale and code are checked. With --source, dense tensors are compared with
    the source byte for byte, and layers are dequantized: their error must be what the report says and, where mxquant
    wrote them, quantizing again must give the same bytes.

    With --load, the model is loaded as its users load it: no parameter may be missing or differ from what the files
    hold, and its first logits must be numbers.

    Warnings are about what is valid but may not run, such as shapes that vLLM's kernels do not support.
    """
    if everything and source is None:
        raise click.UsageError("--all requires --source")
    from mxquant.inspection.verify import verify_checkpoint

    with progress(enabled=not as_json) as display:
        task = display.add_task("Verifying", total=None)
        found = verify_checkpoint(
            path,
            source,
            samples=None if everything else sample,
            load=load,
            trust_remote_code=trust_remote_code,
            progress=lambda name, done, total: display.update(task, completed=done, total=total),
        )
    if as_json:
        write_json(found.to_dict())
    else:
        _print(found)
    sys.exit(found.exit_code)


def _print(found: Verification) -> None:
    kinds: dict[str, list[str]] = defaultdict(list)
    for fault in found.faults:
        kinds[fault.kind].append(fault.message)
    for kind in [k for k in KINDS if k in kinds]:
        for message in kinds[kind][:_SHOWN]:
            click.echo(f"FAULT {kind}: {message}")
        if len(kinds[kind]) > _SHOWN:
            click.echo(f"FAULT {kind}: and {len(kinds[kind]) - _SHOWN} more (--json lists them)")
    for warning in found.warnings[: 2 * _SHOWN]:
        click.echo(f"Warning: {warning}")
    if len(found.warnings) > 2 * _SHOWN:
        click.echo(f"Warning: and {len(found.warnings) - 2 * _SHOWN} more")
    checked = ", ".join(f"{what} {_number(value)}" for what, value in found.checked.items() if value is not None)
    click.echo(f"Checked: {checked}.")
    count = len(found.faults)
    click.echo(f"{found.path}: " + (f"{count} fault{'s' * (count > 1)}" if count else "no faults"))


def _number(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)
