"""Cards in output folders: written, kept, brought back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxquant.checkpoint.layout import REPORT_NAME
from mxquant.convert.card.front_matter import front_matter, is_ours
from mxquant.convert.card.text import SOURCE_CARD_NAME, model_card
from mxquant.errors import CheckpointError

CARD_NAME = "README.md"


def write_card(
    folder: Path,
    report: Mapping[str, Any],
    *,
    base_model: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    path: str | None = None,
) -> Path:
    """Write the card of the output in ``folder``; a card of the source that lies there is kept under another name."""
    card, kept = folder / CARD_NAME, folder / SOURCE_CARD_NAME
    if card.exists() and not is_ours(_read(card)):
        card.replace(kept)
    source_card = _read(kept) if kept.exists() else None
    if base_model is None and card.exists():
        base_model = front_matter(_read(card)).get("base_model")  # one that was given before
    text = model_card(report, base_model=base_model, source_card=source_card, evaluation=evaluation, path=path)
    card.write_text(text, encoding="utf-8")
    return card


def restore_card(folder: Path) -> None:
    """Undo :func:`write_card` in a folder that holds a dense model again."""
    card, kept = folder / CARD_NAME, folder / SOURCE_CARD_NAME
    if card.exists() and is_ours(_read(card)):
        card.unlink()
        if kept.exists():
            kept.replace(card)


def read_report(folder: Path) -> dict[str, Any]:
    """The report that quantizing left in an output, with its place as ``out``.

    Raises ``CheckpointError`` where there is none.
    """
    path = folder / REPORT_NAME
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {REPORT_NAME}, so it is no output of mxquant quantize") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(report, dict) or not {"on_disk", "schemes", "groups", "dense"} <= report.keys():
        raise CheckpointError(f"{path}: not a report of mxquant quantize")
    return report | {"out": str(folder.absolute())}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
