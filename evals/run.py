"""A whole evaluation: load models, measure them on texts and tasks, fill a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxquant.evals.find_model import Source
from mxquant.evals.models import EvalModel, load_model
from mxquant.evals.perplexity import check_vocabularies, evaluate
from mxquant.evals.report import Report
from mxquant.evals.results import ModelResult
from mxquant.evals.settings import EvalSettings
from mxquant.evals.windows import cut_windows, window_length

if TYPE_CHECKING:
    from mxquant.evals.result_store import Memory
    from mxquant.evals.tasks import Metric, TaskSet
    from mxquant.evals.text import EvalText

# stage(what) is a context in which `what` is done; the function it yields takes (done, total).
Stage = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]


@contextlib.contextmanager
def silent(what: str) -> Iterator[Callable[[int, int], None]]:
    """A ``Stage`` without output."""
    yield lambda done, total: None


def run(
    report: Report,
    sources: Sequence[Source],
    settings: EvalSettings,
    *,
    baseline: Source | None = None,
    tasks: TaskSet | None = None,
    memory: Memory | None = None,
    stage: Stage = silent,
) -> None:
    """Evaluate ``sources`` (and the ``baseline``, whose row comes first) into ``report.results``.

    Perplexity is measured on ``report.texts``, tasks are run if there are any. With a baseline all
    models are in memory together, else one after the other. What ``memory`` has is not measured
    again, and a model of which nothing is missing is not loaded. Rows are added as they are found,
    so that what took hours is still there if a later model raises ``MXQuantError``.
    """
    everyone = [*([] if baseline is None else [baseline]), *sources]
    if baseline is not None:
        check_vocabularies(everyone)
    # One window length for all, so that their perplexities can be compared.
    seq_len = window_length(settings.seq_len, {source.name: source.max_positions for source in everyone})
    report.settings = settings.to_dict() | {"seq_len": seq_len}
    subjects = [_Subject(source, name) for source, name in zip(everyone, _distinct_names(everyone), strict=True)]
    for group in [subjects] if baseline is not None else [[subject] for subject in subjects]:
        _Group(report, group, settings, seq_len, baseline is not None, tasks, memory, stage).run()


@dataclass
class _Subject:
    """A model on its way through the evaluation; ``model`` is None if it need not be loaded."""

    source: Source
    name: str
    row: ModelResult | None = None
    model: EvalModel | None = None
    metrics: dict[str, list[Metric]] = field(default_factory=dict)


@dataclass
class _Group:
    """Models that are in memory together, the baseline first if there is one."""

    report: Report
    subjects: list[_Subject]
    settings: EvalSettings
    seq_len: int
    has_baseline: bool
    tasks: TaskSet | None
    memory: Memory | None
    stage: Stage

    def run(self) -> None:
        if self.memory is not None:
            self._recall(self.memory)
        self._load()
        rows = [subject.row for subject in self.subjects if subject.row is not None]
        for row in rows[self.has_baseline :]:
            row.baseline = rows[0] if self.has_baseline else None
        rows[0].is_baseline = self.has_baseline
        for text in self.report.texts:
            self._measure(text)
            if text is self.report.texts[0]:
                self.report.results += rows
        for subject, row in zip(self.subjects, rows, strict=True):
            self._run_tasks(subject, row)
            if not self.report.texts:
                self.report.results.append(row)

    def _recall(self, memory: Memory) -> None:
        """Fill rows with what is known already."""
        with self.stage("checking the cache"):
            for subject in self.subjects:
                subject.row = memory.row(subject.source, subject.name)
                if subject.row is None:
                    continue
                for text in self.report.texts:
                    found = memory.perplexity(subject.source, text, self.seq_len, self._baseline_of(subject))
                    if found is not None:
                        subject.row.perplexities[text.name] = found
                for name in self._missing_tasks(subject):
                    if (metrics := memory.metrics(subject.source, name)) is not None:
                        subject.metrics[name] = metrics

    def _baseline_of(self, subject: _Subject) -> Source | None:
        is_compared = self.has_baseline and subject is not self.subjects[0]
        return self.subjects[0].source if is_compared else None

    def _load(self) -> None:
        """Load what has something to do."""
        missing = [subject for subject in self.subjects if self._is_incomplete(subject)]
        # A model is compared with the baseline's logits, which nothing keeps.
        if self.has_baseline and any(self._missing_texts(subject) for subject in self.subjects[1:]):
            missing = [self.subjects[0], *(subject for subject in missing if subject is not self.subjects[0])]
        for subject in missing:
            with self.stage(f"loading {subject.name}"):
                subject.model = load_model(
                    subject.source,
                    dtype=self.settings.dtype,
                    device=self.settings.device,
                    name=subject.name,
                    trust_remote_code=self.settings.trust_remote_code,
                )
            if subject.row is None:
                subject.row = ModelResult.of(subject.model)
                if self.memory is not None:
                    self.memory.keep_row(subject.source, subject.row)
        if len(self.report.texts) > 1:  # a later one that is too short is known now, not after the first
            for subject in missing:
                for text in self.report.texts:
                    assert subject.model is not None
                    cut_windows(subject.model.tokenizer, text, self.seq_len, 1)

    def _is_incomplete(self, subject: _Subject) -> bool:
        return subject.row is None or bool(self._missing_texts(subject)) or bool(self._missing_tasks(subject))

    def _missing_texts(self, subject: _Subject) -> list[EvalText]:
        known = {} if subject.row is None else subject.row.perplexities
        return [text for text in self.report.texts if text.name not in known]

    def _missing_tasks(self, subject: _Subject) -> list[str]:
        names = [] if self.tasks is None else self.tasks.names
        return [name for name in names if name not in subject.metrics]

    def _measure(self, text: EvalText) -> None:
        """The perplexity on a text of every model that lacks it."""
        models = [s for s in self.subjects[self.has_baseline :] if text in self._missing_texts(s)]
        baseline = self.subjects[0] if self.has_baseline and models else None
        if self.has_baseline and not models and text in self._missing_texts(self.subjects[0]):
            models = self.subjects[:1]
        if not models:
            return
        everyone = [*([] if baseline is None else [baseline]), *models]
        names = everyone[0].name if len(everyone) == 1 else f"{len(everyone)} models"
        on = f" on {text.name}" if len(self.report.texts) > 1 else ""
        with self.stage(f"perplexity of {names}{on}") as progress:
            measured = evaluate(
                [_loaded(subject) for subject in models],
                text,
                baseline=None if baseline is None else _loaded(baseline),
                seq_len=self.seq_len,
                windows=self.settings.windows,
                batch_size=self.settings.batch_size,
                progress=progress,
            )
        for subject, found in zip(everyone, measured, strict=True):
            assert subject.row is not None
            # In the order of the texts, whatever was known before.
            known = subject.row.perplexities | {text.name: found}
            subject.row.perplexities = {t.name: known[t.name] for t in self.report.texts if t.name in known}
            if self.memory is not None:
                self.memory.keep_perplexity(subject.source, text, found, self.seq_len, self._baseline_of(subject))

    def _run_tasks(self, subject: _Subject, row: ModelResult) -> None:
        """Every task that the row lacks; lm-eval draws its own progress bars, so there is no stage."""
        if self.tasks is None:
            return
        options = {name: getattr(self.settings, name) for name in ("limit", "num_fewshot", "batch_size")}
        for name in self._missing_tasks(subject):
            metrics = self.tasks.run(_loaded(subject), names=[name], **options)
            subject.metrics[name] = metrics
            if self.memory is not None:
                self.memory.keep_metrics(subject.source, name, metrics)
        row.tasks = [metric for name in self.tasks.names for metric in subject.metrics[name]]


def _loaded(subject: _Subject) -> EvalModel:
    assert subject.model is not None
    return subject.model


def _distinct_names(sources: list[Source]) -> list[str]:
    """Short names, or what the user typed where two short ones are the same."""
    short = [source.name for source in sources]
    return [s.name if short.count(s.name) == 1 else s.given for s in sources]
