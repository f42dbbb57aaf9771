"""What earlier evaluations found, so that a comparison can grow.

A figure is kept by hashes of all that it follows from: every file of the model (and of the
baseline), the text or the task's items, the settings, the versions and the code that computed it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mxquant.evals.cache import ResultCache, code_hash, model_hash
from mxquant.evals.divergence import Divergence
from mxquant.evals.models import pick_device
from mxquant.evals.perplexity import Perplexity
from mxquant.evals.report import versions
from mxquant.evals.results import ModelResult
from mxquant.evals.tasks import Metric, TaskSet

if TYPE_CHECKING:
    from mxquant.evals.find_model import Source
    from mxquant.evals.settings import EvalSettings
    from mxquant.evals.text import EvalText

_DESCRIPTION = ("scheme", "bits_per_weight", "disk_bytes", "weight_bytes", "dtype", "device")


@dataclass
class Memory:
    """The figures that ``cache`` has for these settings and tasks.

    What is not known of a model, or of its baseline, is None; a model without a hash has nothing.
    """

    cache: ResultCache
    settings: EvalSettings
    tasks: TaskSet | None = None
    _hashes: dict[str, str | None] = field(default_factory=dict)
    _task_hashes: dict[str, str] = field(default_factory=dict)

    def row(self, source: Source, name: str) -> ModelResult | None:
        """A row without results, as of the loaded model."""
        found = self._load(self._fields(source, "model"))
        return None if found is None else ModelResult(name, source.given, **found)

    def keep_row(self, source: Source, row: ModelResult) -> None:
        self._store(self._fields(source, "model"), {name: getattr(row, name) for name in _DESCRIPTION})

    def perplexity(self, source: Source, text: EvalText, seq_len: int, baseline: Source | None) -> Perplexity | None:
        found = self._load(self._text_fields(source, text, seq_len, baseline))
        if found is None:
            return None
        nll = torch.tensor(found.pop("window_nll"), dtype=torch.float64)
        against = found.pop("divergence")
        divergence = None if against is None else Divergence(**{k: _interval(v) for k, v in against.items()})
        return Perplexity(**found, window_nll=nll, divergence=divergence, cached=True)

    def keep_perplexity(
        self, source: Source, text: EvalText, found: Perplexity, seq_len: int, baseline: Source | None
    ) -> None:
        """One with a problem is not kept."""
        if found.problem is None:
            plain = {name: getattr(found, name) for name in ("name", "tokens", "seq_len", "bos", "seconds")}
            plain["window_nll"] = found.window_nll.tolist()
            plain["divergence"] = None if found.divergence is None else asdict(found.divergence)
            self._store(self._text_fields(source, text, seq_len, baseline), plain)

    def metrics(self, source: Source, task: str) -> list[Metric] | None:
        found = self._load(self._task_fields(source, task))
        if found is None:
            return None
        return [Metric(**m | {"items": None if m["items"] is None else tuple(m["items"])}) for m in found["metrics"]]

    def keep_metrics(self, source: Source, task: str, metrics: list[Metric]) -> None:
        kept = [asdict(replace(metric, cached=True)) for metric in metrics]
        self._store(self._task_fields(source, task), {"metrics": kept})

    def _text_fields(
        self, source: Source, text: EvalText, seq_len: int, baseline: Source | None
    ) -> dict[str, Any] | None:
        fields, other = self._fields(source, "text"), None if baseline is None else self._hash(baseline)
        if fields is None or (baseline is not None and other is None):
            return None
        own = {"text": text.sha256, "seq_len": seq_len, "windows": self.settings.windows, "baseline": other}
        return fields | own | {"batch_size": self.settings.batch_size}

    def _task_fields(self, source: Source, task: str) -> dict[str, Any] | None:
        fields = self._fields(source, "task")
        if fields is None or self.tasks is None:
            return None
        if task not in self._task_hashes:
            self._task_hashes[task] = self.tasks.hash(task, self.settings.num_fewshot)
        settings = {name: getattr(self.settings, name) for name in ("limit", "num_fewshot", "batch_size")}
        return fields | {"task": self._task_hashes[task]} | settings

    def _fields(self, source: Source, kind: str) -> dict[str, Any] | None:
        """What every figure follows from."""
        if (model := self._hash(source)) is None:
            return None
        return {
            "kind": kind,
            "model": model,
            "dtype": self.settings.dtype,
            "device": pick_device(self.settings.device).type,
            "versions": versions(),
            "code": code_hash(),
        }

    def _hash(self, source: Source) -> str | None:
        if source.given not in self._hashes:
            self._hashes[source.given] = model_hash(source)
        return self._hashes[source.given]

    def _load(self, fields: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if fields is None else self.cache.load(fields)

    def _store(self, fields: dict[str, Any] | None, result: dict[str, Any]) -> None:
        if fields is not None:
            self.cache.store(fields, result)


def _interval(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
