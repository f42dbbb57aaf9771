"""Downstream tasks by lm-evaluation-harness, on models that are already loaded.

The only file that imports ``lm_eval``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import inspect
import json
import math
import numbers
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.evals.hub import ensure_quick_failure
from mxquant.evals.local_tasks import rows
from mxquant.evals.models import EvalModel
from mxquant.evals.quiet import quiet

# For standard errors of metrics that are not plain means (those of accuracies need none).
_BOOTSTRAP_ITERATIONS = 1000


@dataclass(frozen=True)
class Metric:
    """One figure of one task; ``stderr`` is None where lm-eval has none.

    ``name`` carries lm-eval's filter, where there is one: ``acc``, ``exact_match,strict-match``.
    ``items``: the figure of each item, in order, where the whole is their mean. ``cached``: not
    measured this time.
    """

    task: str
    name: str
    value: float
    stderr: float | None
    higher_is_better: bool | None = None
    items: tuple[float, ...] | None = field(default=None, repr=False)
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``items`` stays out."""
        return {
            "value": self.value if math.isfinite(self.value) else None,
            "stderr": self.stderr,
            "higher_is_better": self.higher_is_better,
            "cached": self.cached,
        }


class TaskSet:
    """Tasks that exist and whose data are here, ready to run on several models.

    ``names`` are lm-eval's tasks, groups, tags or YAML files, or ``NAME=FILE`` for a task of
    :mod:`mxquant.evals.local_tasks` with its data; ``include_path`` is a folder with more task
    YAMLs. Everything that can fail without a model fails here, as an ``MXQuantError`` of one
    line: unknown names, data that are not cached while the hub is out of reach, broken files.
    """

    def __init__(self, names: Sequence[str], include_path: str | Path | None = None):
        if include_path is not None and not Path(include_path).is_dir():
            raise MXQuantError(f"--include-path {include_path} is not a folder")
        self.names = [name.strip() for name in names if name.strip()]
        if not self.names:
            raise MXQuantError("no tasks given; see `lm_eval ls tasks` for their names")
        bare = [name.partition("=")[0] for name in self.names]
        if twice := sorted({name for name in bare if bare.count(name) > 1}):
            raise MXQuantError(f"task {twice[0]} is given twice")
        if not all("=" in name for name in self.names):
            ensure_quick_failure()
        with _quiet():
            self._manager = self._index(include_path)
            for name in self.names:
                self._check_name(name)
            self._tasks = {name: self._load(name) for name in self.names}
            # As they are now: lm-eval writes into them when it runs.
            self._configs = {name: [task.dump_config() for task in _leaves(self._tasks[name])] for name in self.names}

    def hash(self, name: str, num_fewshot: int | None = None) -> str:
        """A hash of one of ``names``: of all items, solved examples and settings, wherever they come from."""
        digest = hashlib.sha256(importlib.metadata.version("lm_eval").encode())
        with _quiet():
            for task, config in zip(_leaves(self._tasks[name]), self._configs[name], strict=True):
                digest.update(task.task_name.encode())
                for part in _content(task, config, num_fewshot):
                    digest.update(json.dumps(part, sort_keys=True, default=_plain).encode())
        return digest.hexdigest()

    def _index(self, include_path: str | Path | None) -> Any:
        """lm-eval's index of tasks. Its own 14,000 are read only if a name may be among them."""
        from lm_eval.tasks import TaskManager

        include = None if include_path is None else str(include_path)
        own = TaskManager(include_path=include, include_defaults=False)
        if all("=" in name or _is_yaml(name) or name in own.all_subtasks for name in self.names):
            return own
        return TaskManager(include_path=include)

    def _check_name(self, name: str) -> None:
        task, given, _ = name.partition("=")
        if given:
            if task not in rows.names():
                raise MXQuantError(f"a file goes with the tasks {' and '.join(rows.names())}, not with {task!r}")
            return
        known = self._manager.all_tasks
        if name in known or _is_yaml(name):
            return
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}" if close else "`lm_eval ls tasks` lists them all"
        raise MXQuantError(f"unknown task {name!r}: {hint}; tasks of your own need --include-path FOLDER")

    def _load(self, name: str) -> list[Any]:
        task, given, file = name.partition("=")
        try:
            loaded = self._manager.load([_with_data(task, file) if given else name])
        except MXQuantError:
            raise
        except Exception as error:  # data sets, YAML and imports fail in many ways
            raise _explain(name, error) from error
        # Groups keep their own order and subgroups; only those that no other one contains go in.
        contained = {child for children in loaded["group_map"].values() for child in children}
        groups = [group for key, group in loaded["groups"].items() if key not in contained]
        grouped = {task.task_name for group in groups for task in group.get_all_tasks()}
        return [*groups, *(task for key, task in loaded["tasks"].items() if key not in grouped)]

    def run(
        self,
        model: EvalModel,
        *,
        names: Sequence[str] | None = None,
        limit: float | None = None,
        num_fewshot: int | None = None,
        batch_size: int = 1,
    ) -> list[Metric]:
        """Evaluate a loaded model on all of ``self.names``, or some of them.

        ``limit`` takes the first n items of each task, or a share below 1; figures are then rough.
        lm-eval's own defaults hold for everything else. Raises ``MXQuantError`` if it fails.
        """
        tasks = [task for name in (self.names if names is None else names) for task in self._tasks[name]]
        with _quiet(), _without_git():
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM

            try:
                wrapped = HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch_size)
                results = simple_evaluate(
                    wrapped,
                    tasks=tasks,
                    limit=limit,
                    num_fewshot=num_fewshot,
                    bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                    log_samples=True,
                    task_manager=self._manager,
                )
            except Exception as error:  # one line for people; the cause is kept for MXQUANT_DEBUG
                raise MXQuantError(f"lm-eval failed on {model.name}: {_summary(error)}") from error
        return _metrics(results)


def _leaves(loaded: list[Any]) -> list[Any]:
    """The tasks themselves, those of groups too."""
    return [task for part in loaded for task in (part.get_all_tasks() if hasattr(part, "get_all_tasks") else [part])]


def _content(task: Any, config: dict[str, Any], num_fewshot: int | None) -> Iterator[Any]:
    """Everything that decides what a task asks, and what it counts as right."""
    # Where the items come from says nothing: they are here themselves.
    yield {key: value for key, value in config.items() if key not in ("dataset_kwargs", "custom_dataset", "metadata")}
    yield from task.eval_docs
    if num_fewshot if num_fewshot is not None else config.get("num_fewshot"):
        yield "solved examples"
        yield from task.fewshot_docs() or []


def _plain(value: Any) -> str:
    """What a hash sees of a function or another object: nothing that changes from process to process."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _with_data(task: str, file: str) -> dict[str, Any]:
    """A task of ``local_tasks`` as lm-eval's config, with its data."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return {**load_yaml(rows.definition(task)), "dataset_kwargs": {"path": str(Path(file).expanduser())}}


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _metrics(results: dict[str, Any]) -> list[Metric]:
    """lm-eval's ``{"acc,none": .5, "acc_stderr,none": .1}`` as metrics."""
    metrics = []
    for task, figures in {**results["results"], **results.get("groups", {})}.items():
        better = results.get("higher_is_better", {}).get(task, {})
        for key, value in figures.items():
            name, _, filter_name = key.partition(",")
            if not filter_name or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = figures.get(f"{name}_stderr,{filter_name}")
            label = name if filter_name == "none" else key
            number = float(stderr) if isinstance(stderr, int | float) else None
            items = _items(results.get("samples", {}).get(task, []), name, filter_name, float(value))
            metrics.append(Metric(task, label, float(value), number, better.get(name), items))
    return metrics


def _items(samples: list[dict[str, Any]], name: str, filter_name: str, value: float) -> tuple[float, ...] | None:
    """The figures of the items, if there are such and ``value`` is their mean."""
    chosen = sorted((s for s in samples if s["filter"] == filter_name), key=lambda sample: sample["doc_id"])
    found = [sample.get(name) for sample in chosen]
    if not found or not all(isinstance(item, numbers.Real) for item in found):
        return None
    items = tuple(float(item) for item in found)  # type: ignore[arg-type]
    return items if math.isclose(math.fsum(items) / len(items), value, rel_tol=1e-9, abs_tol=1e-12) else None


def _explain(name: str, error: BaseException) -> MXQuantError:
    offline = {"ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ProxyError"}
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(type(link).__name__ in offline for link in chain):
        return MXQuantError(
            f"task {name!r} needs data from the hub, which cannot be reached and has not cached them here; "
            "a task with local files works by --include-path FOLDER"
        )
    return MXQuantError(f"cannot load task {name!r}: {_summary(error)}")


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Keep lm-eval's remarks to itself, and whatever it prints off standard output."""
    return quiet(("lm_eval", "datasets"))


@contextlib.contextmanager
def _without_git() -> Iterator[None]:
    """lm-eval asks git for the commit of the user's folder, and git complains where there is none."""
    from lm_eval import evaluator

    ask, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = ask
