"""A whole evaluation: load models, measure them on a text and on tasks, fill a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mxquant.evals.models import EvalModel, load_model
from mxquant.evals.perplexity import check_vocabularies, evaluate
from mxquant.evals.report import ModelResult, Report
from mxquant.evals.sources import Source
from mxquant.evals.windows import window_length

if TYPE_CHECKING:
    from mxquant.evals.tasks import TaskSet

# stage(what) is a context in which `what` is done; the function it yields takes (done, total).
Stage = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class EvalSettings:
    """How models are evaluated; the fields are the options of ``mxquant eval``."""

    seq_len: int | None = None
    windows: int | None = None
    batch_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    tasks: str | None = None
    limit: float | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    trust_remote_code: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def silent(what: str) -> Iterator[Callable[[int, int], None]]:
    """A ``Stage`` that tells nobody."""
    yield lambda done, total: None


def run(
    report: Report,
    sources: Sequence[Source],
    settings: EvalSettings,
    *,
    baseline: Source | None = None,
    tasks: TaskSet | None = None,
    stage: Stage = silent,
) -> None:
    """Evaluate ``sources`` (and the ``baseline``, whose row comes first) into ``report.results``.

    Perplexity is measured on ``report.text`` if there is one, tasks are run if there are any. With
    a baseline all models are in memory together, else one after the other. Rows are added as they
    are found, so that what took hours is still there if a later model raises ``MXQuantError``.
    """
    everyone = [*([] if baseline is None else [baseline]), *sources]
    if baseline is not None:
        check_vocabularies(everyone)
    # One window length for all, so that their perplexities can be compared.
    seq_len = window_length(settings.seq_len, {source.name: source.max_positions for source in everyone})
    report.settings = settings.to_dict() | {"seq_len": seq_len}
    names = _distinct_names(everyone)
    groups = [range(len(everyone))] if baseline is not None else [[i] for i in range(len(everyone))]
    for group in groups:
        chosen = [(everyone[i], names[i]) for i in group]
        _run_group(report, chosen, settings, seq_len, baseline is not None, tasks, stage)


def _run_group(
    report: Report,
    chosen: list[tuple[Source, str]],
    settings: EvalSettings,
    seq_len: int,
    has_baseline: bool,
    tasks: TaskSet | None,
    stage: Stage,
) -> None:
    models = []
    for source, name in chosen:
        with stage(f"loading {name}"):
            model = load_model(
                source,
                dtype=settings.dtype,
                device=settings.device,
                name=name,
                trust_remote_code=settings.trust_remote_code,
            )
        models.append(model)
    rows = [ModelResult.of(model, is_baseline=has_baseline and i == 0) for i, model in enumerate(models)]
    if report.text is not None:
        names = models[0].name if len(models) == 1 else f"{len(models)} models"
        with stage(f"perplexity of {names}") as progress:
            measured = evaluate(
                models[has_baseline:],
                report.text,
                baseline=models[0] if has_baseline else None,
                seq_len=seq_len,
                windows=settings.windows,
                batch_size=settings.batch_size,
                progress=progress,
            )
        for row, result in zip(rows, measured, strict=True):
            row.perplexity = result
    if report.text is not None or tasks is None:
        report.results += rows
    for model, row in zip(models, rows, strict=True):
        if tasks is not None:
            row.tasks = _run_tasks(model, tasks, settings)
            if report.text is None:
                report.results.append(row)


def _run_tasks(model: EvalModel, tasks: TaskSet, settings: EvalSettings) -> list[Any]:
    """lm-eval draws its own progress bars, so there is no stage around it."""
    return tasks.run(model, limit=settings.limit, num_fewshot=settings.num_fewshot, batch_size=settings.batch_size)


def _distinct_names(sources: list[Source]) -> list[str]:
    """Short names, or what the user typed where two short ones are the same."""
    short = [source.name for source in sources]
    return [s.name if short.count(s.name) == 1 else s.given for s in sources]
