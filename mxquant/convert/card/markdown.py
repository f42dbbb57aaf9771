"""Markdown."""

from __future__ import annotations

from typing import Any


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table; bars in its cells are escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
