"""Runs that are killed and resumed, for test_resume.py: ``python resume_child.py JSON``; prints JSON.

Everything is imported and planned once. Each run is a fork of this process, which never has a second
thread itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.writer import ShardWriter
from mxquant.convert.pipeline import plan_model, run_plan


class Runs:
    """Runs of one request, in ``folder``: of the plan for ``source`` to ``folder/out``."""

    def __init__(self, folder: Path, source: str, scheme: str, max_shard_bytes: int, old: str | None):
        self._checkpoint, self._plan = plan_model(source, scheme, max_shard_bytes=max_shard_bytes)
        self.folder, self.out, self._old = folder, folder / "out", None if old is None else Path(old)

    def prepare(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if self._old:
            shutil.copytree(self._old, self.out)

    def start(self, **how: Any) -> int:
        """The process of a run; ``steps``: the file that names of steps go to, ``kill_at``: the step before which."""
        pid = os.fork()
        if not pid:
            code = 1
            try:
                self._work(**how)
                code = 0
            finally:
                os._exit(code)
        return pid

    def _work(self, resume: bool, kill_at: int | None = None, steps: Path | None = None) -> None:
        if kill_at is not None or steps:
            watch(self.folder, -1 if kill_at is None else kill_at, steps)
        run_plan(self._checkpoint, self._plan, self.out, resume=resume, overwrite=self._old is not None)

    def contents(self) -> dict[str, str]:
        return {str(p.relative_to(self.folder)): p.read_bytes().hex() for p in self.folder.rglob("*") if p.is_file()}

    def old_is_lost(self) -> bool:
        """Whether the old output, or the new one in its place, is gone from where it can be found."""
        aside = self.folder / "out.partial" / "replaced"
        return self._old is not None and not any((place / "config.json").exists() for place in (self.out, aside))


def watch(folder: Path, kill_at: int, steps: Path | None) -> None:
    """Count each step that touches a file under ``folder``, before it is done."""
    count, writes, inside = 0, 0, f"{folder}{os.sep}"

    def step(name: str) -> None:
        nonlocal count
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        if steps:
            os.write(log, f"{name}\n".encode())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("fcntl.flock", "os.truncate") or (
            event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(arguments[0]).startswith(inside)
        ):
            step(event)

    def write(writer: ShardWriter, *arguments: Any) -> None:
        nonlocal writes
        if writes % 8 == 0:  # they are much alike
            step("write")
        writes += 1
        original(writer, *arguments)

    def fsync(descriptor: int) -> None:
        step("fsync")  # and no more: what it is for is the death of the computer

    if steps:
        log = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    original = ShardWriter.write
    ShardWriter.write = write  # type: ignore[method-assign]
    os.fsync = fsync
    sys.addaudithook(audit)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_every_step(runs: Runs, steps: Path) -> dict[str, Any]:
    runs.prepare()
    assert wait(runs.start(resume=False, steps=steps)) == 0
    names, expected, wrong, kills = steps.read_text().split(), runs.contents(), [], 0
    for step in range(len(names)):
        runs.prepare()
        kills += wait(runs.start(resume=False, kill_at=step)) == -signal.SIGKILL
        lost = runs.old_is_lost()
        code = wait(runs.start(resume=True))
        if code or lost or runs.contents() != expected:
            wrong.append([step, names[step], code, lost])
    return {"steps": names, "kills": kills, "wrong": wrong}


def at_random(runs: Runs, kills: int, seed: int) -> dict[str, Any]:
    runs.prepare()
    began = time.perf_counter()
    assert wait(runs.start(resume=False)) == 0
    seconds = time.perf_counter() - began
    expected, rng, hits, wrong = runs.contents(), random.Random(seed), 0, []
    while hits < kills:
        runs.prepare()
        code: int = -signal.SIGKILL
        while code == -signal.SIGKILL:
            pid = runs.start(resume=True)
            time.sleep(rng.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)  # a process that has ended stays until it is waited for
            code = wait(pid)
            hits += code == -signal.SIGKILL
        if code or runs.contents() != expected:
            wrong.append([hits, code])
    return {"kills": hits, "wrong": wrong}


def main() -> None:
    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    runs = Runs(folder / "runs", request["source"], request["scheme"], request["max_shard_bytes"], request["old"])
    kills = request["random_kills"]
    print(json.dumps(at_random(runs, kills, 0) if kills else at_every_step(runs, folder / "steps")))


if __name__ == "__main__":
    main()
