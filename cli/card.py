"""``mxquant card``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mxquant.cli.common import handle_errors

_EPILOG = """\b
Examples:
  mxquant eval ./small --baseline org/name --output quality.json
  mxquant card ./small --eval quality.json --base-model org/name
  mxquant card ./small --push-to-hub me/small
"""


@click.command("card", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--eval", "results", type=click.Path(path_type=Path), help="Results of mxquant eval --output.")
@click.option(
    "--base-model", metavar="ID", help="Hub id of the source.  [default: the hub id given to quantize, if any]"
)
@click.option("--push-to-hub", "repo", metavar="REPO", help="Upload PATH when done; a new repository is private.")
@handle_errors
def card_command(path: Path, results: Path | None, base_model: str | None, repo: str | None) -> None:
    """Rewrite the model card of the output PATH with measured quality.

    mxquant quantize writes a card without measurements. The card of the source is kept as README.source.md; its
    license, language and tags are kept.
    """
    from mxquant.checkpoint.upload import check_can_push, push_folder
    from mxquant.convert.card.files import read_report, write_card

    report = read_report(path)
    evaluation = None if results is None else _read(results)
    if repo is not None:
        check_can_push(repo)
    card = write_card(path, report, base_model=base_model, evaluation=evaluation, path=repo)
    click.echo(f"Wrote {card}")
    if repo is not None:
        click.echo(f"Pushed to {push_folder(path, repo)}")


def _read(results: Path) -> dict[str, Any]:
    from mxquant.errors import MXQuantError

    try:
        data = json.loads(results.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MXQuantError(f"{results}: not the JSON of mxquant eval --output ({error})") from error
    if not isinstance(data, dict):
        raise MXQuantError(f"{results}: not the JSON of mxquant eval --output")
    return data
