"""A whole sweep: the cells of a grid, measured here or on several devices, and what they say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.evals.find_model import Source
from mxquant.evals.report import versions
from mxquant.evals.sweep.cells import Cell
from mxquant.evals.sweep.grid import Grid
from mxquant.evals.sweep.inversions import Inversion, find_inversions
from mxquant.evals.sweep.jobs import run_on_devices
from mxquant.evals.sweep.work import Done, Job, OnProgress, SweepSettings, check_source, run_job
from mxquant.evals.text import EvalText

# Raised when a key of the JSON changes its meaning or goes away; new keys may come at any time.
SCHEMA_VERSION = 1


@dataclass
class Sweep:
    """What a sweep found. ``dense`` is the floor; ``cells`` are in the order of the grid."""

    model: str
    text: EvalText
    settings: dict[str, Any]
    about: dict[str, Any]
    dense: Cell
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)

    @property
    def inversions(self) -> list[Inversion]:
        return find_inversions(self.cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without NaN or infinity. Keys are stable within a schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "versions": versions(),
            "model": self.model,
            "about": self.about,
            "text": self.text.to_dict(),
            "settings": self.settings,
            "dense": self.dense.to_dict(),
            "cells": [cell.to_dict() for cell in self.cells],
            "inversions": [inversion.to_dict() for inversion in self.inversions],
            "notes": self.notes,
        }


def sweep(
    source: str | Path | Source,
    text: EvalText,
    grid: Grid,
    settings: SweepSettings | None = None,
    *,
    cache: Path | None = None,
    devices: list[str] | None = None,
    on_done: Callable[[Done], None] = lambda done: None,
    on_progress: OnProgress = lambda what, share: None,
) -> Sweep:
    """Measure a dense model in every format of a grid.

    Parameters
    ----------
    cache : folder of finished cells; None is the user's, see :func:`default_folder`.
    devices : work on several at once, a process and a copy of the model each; None works here, on
        the device of the settings.
    on_done, on_progress : called with each finished cell, and with the share of the current one.

    Raises ``MXQuantError`` for a model that is quantized or has no perplexity, a text that is too
    short, or a grid without cells. Cells that are finished by then stay in the cache.
    """
    settings = settings or SweepSettings()
    specs, notes = grid.cells()
    if not specs:
        raise MXQuantError("; ".join(["this grid has no cells", *notes]))
    job = Job(str(source.given if isinstance(source, Source) else source), text, specs, settings, cache)
    check_source(source, settings)
    found: dict[int, Cell] = {}
    about: dict[str, Any] = {}
    run = run_job if devices is None else partial(run_on_devices, devices=devices)
    for done in run(job, on_progress=on_progress, about=about):
        found[done.number] = done.cell
        on_done(done)
    notes += about.pop("notes", [])
    cells = [found[i + 1] for i in range(len(specs))]
    notes += list(dict.fromkeys(note for cell in cells for note in cell.notes))
    fields = {k: v for k, v in asdict(settings).items() if v is not None}
    fields |= {"windows": about.pop("windows"), "seq_len": about.pop("seq_len")}
    return Sweep(about.pop("name"), text, fields, about, found[0], cells, notes)
