"""The work of a sweep in one process: load the model once, measure what the cache does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.evals.find_model import Source, find_model
from mxquant.evals.inplace import RememberingVariant, linear_weights
from mxquant.evals.models import load_model
from mxquant.evals.sweep.cache import CellCache, default_folder
from mxquant.evals.sweep.cells import Bench, Cell, measure
from mxquant.evals.sweep.grid import CellSpec
from mxquant.evals.text import EvalText
from mxquant.evals.windows import cut_windows, window_length

# What the dense model makes of the windows is kept up to this size; beyond, its body runs again.
_REMEMBERED_BYTES = 2 << 30


@dataclass(frozen=True)
class SweepSettings:
    """How cells are measured; the fields are options of ``mxquant sweep``."""

    seq_len: int | None = None
    windows: int | None = None
    batch_size: int = 1
    tasks: str | None = None
    limit: float | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Done:
    """A cell that is finished: its number of all, and whether it came from the cache."""

    number: int
    cell: Cell
    cached: bool


# Called with what is in work and the share of it that is done, 0 to 1.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class Job:
    """The cells that one process measures: ``None`` is the dense model, always cell 0."""

    source: str
    text: EvalText
    specs: list[CellSpec]
    settings: SweepSettings
    cache: Path | None
    first: int = 0
    step: int = 1

    @property
    def numbers(self) -> list[int]:
        """Of the cells that this job measures."""
        return [0, *range(1 + self.first, 1 + len(self.specs), self.step)]


def check_source(source: str | Path | Source, settings: SweepSettings) -> Source:
    """The model's config; raises ``MXQuantError`` for one that is not there, or quantized."""
    found = source if isinstance(source, Source) else find_model(source, trust_remote_code=settings.trust_remote_code)
    if found.quant_method is not None:
        raise MXQuantError(
            f"{found.given} is already quantized ({found.quant_method}); a sweep starts from the dense model"
        )
    return found


def run_job(job: Job, on_progress: OnProgress, about: dict[str, Any]) -> Iterator[Done]:
    """Measure the cells of a job, one after the other; fills ``about`` with what is known of the model."""
    on_progress("loading the model", 0.0)
    bench = make_bench(job)
    cache = CellCache(job.cache or default_folder(), bench)
    dense = bench.dense
    about |= {
        "name": dense.name,
        "dtype": str(dense.model.dtype).removeprefix("torch."),
        "device": str(dense.device),
        "quantized_parameters": sum(linear.parameter.numel() for linear in bench.linears),
        "matrices": sum(len(linear.matrices) for linear in bench.linears),
        "seq_len": bench.windows.shape[1],
        "windows": bench.windows.shape[0],
    }
    for number in job.numbers:
        spec = job.specs[number - 1] if number else None
        what = spec.text if spec else "dense"
        cell = cache.load(spec)
        cached = cell is not None
        if cell is None:
            cell = measure(bench, spec, lambda done, total, what=what: on_progress(what, done / total))  # type: ignore[misc]
            cache.store(cell)
        yield Done(number, cell, cached)
    about["notes"] = cache.notes()


def make_bench(job: Job) -> Bench:
    """The model, its linear weights and the windows, ready to measure."""
    settings = job.settings
    tasks = None
    if settings.tasks is not None:
        from mxquant.evals.tasks import TaskSet

        tasks = TaskSet(settings.tasks.split(","), settings.include_path)
    source = check_source(job.source, settings)
    length = window_length(settings.seq_len, {source.name: source.max_positions})
    model = load_model(
        source, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    windows = cut_windows(model.tokenizer, job.text, length, settings.windows)
    linears = linear_weights(model.model)
    dense = RememberingVariant.of(model, model.name, linears, budget=_REMEMBERED_BYTES)
    return Bench(dense, windows, settings.batch_size, tasks, settings.limit, settings.num_fewshot)
