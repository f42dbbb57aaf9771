"""A sweep on several devices: one process and one copy of the model on each.

Accelerate puts the model on its device. Cells are dealt out in turn, and all processes share the
cache, so nothing is lost if one of them fails.
"""

from __future__ import annotations

import multiprocessing
import queue
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.evals.sweep.cells import Cell
from mxquant.evals.sweep.work import Done, Job, OnProgress, run_job

# How often to look whether a process has died without a word.
_PATIENCE_SECONDS = 2.0


def cuda_devices(count: int) -> list[str]:
    """The first ``count`` CUDA devices. Raises ``MXQuantError`` if there are fewer."""
    import torch

    found = torch.cuda.device_count()
    if count > found:
        raise MXQuantError(f"--jobs {count} needs {count} CUDA devices, of which this machine has {found}")
    return [f"cuda:{i}" for i in range(count)]


def run_on_devices(job: Job, devices: list[str], on_progress: OnProgress, about: dict[str, Any]) -> Iterator[Done]:
    """As :func:`mxquant.evals.sweep.work.run_job`, with the cells in the order they are finished."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    shares = [
        replace(job, settings=replace(job.settings, device=device), first=i, step=len(devices))
        for i, device in enumerate(devices)
    ]
    processes = [context.Process(target=run_share, args=(share, messages), daemon=True) for share in shares]
    on_progress(f"loading the model on {len(devices)} devices", 0.0)
    for process in processes:
        process.start()
    notes: list[str] = []
    seen: set[int] = set()
    try:
        for kind, content in _messages(messages, processes):
            if kind == "about":
                notes += [note for note in content.pop("notes") if note not in notes]
                about |= content | {"device": ", ".join(devices), "notes": notes}
            elif content["number"] not in seen:  # every process has the dense model
                seen.add(content["number"])
                yield Done(content["number"], Cell.from_dict(content["cell"]), content["cached"])
    finally:
        for process in processes:
            process.terminate()


def _messages(messages: Any, processes: list[Any]) -> Iterator[tuple[str, Any]]:
    """What the processes say, until each has said ``about``, which is its last word."""
    working = len(processes)
    while working:
        try:
            kind, content = messages.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            for process in processes:
                if process.exitcode:
                    raise MXQuantError(f"a worker process of the sweep failed (exit code {process.exitcode})") from None
            continue
        if kind == "error":
            raise MXQuantError(content)
        working -= kind == "about"
        yield kind, content


def run_share(job: Job, messages: Any) -> None:
    about: dict[str, Any] = {}
    try:
        for done in run_job(job, lambda what, share: None, about):
            messages.put(("cell", {"number": done.number, "cell": done.cell.to_dict(), "cached": done.cached}))
        messages.put(("about", about))
    except MXQuantError as error:
        messages.put(("error", f"{job.settings.device}: {error}"))
    except Exception:
        messages.put(("error", f"{job.settings.device}: {traceback.format_exc(limit=3)}"))
