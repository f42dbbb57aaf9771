# SPDX-License-Identifier: Apache-2.0
"""Kill ``mxquant quantize --resume`` at random moments until its output is whole, and compare all bytes.

Each run of each configuration is killed by SIGKILL and started again with the same command, over and
over, until one attempt comes through. The folder must then be, file by file and byte by byte, that of
a run that nobody disturbed, and nothing may lie beside it. Moments are uniform over the time that an
undisturbed run takes; every fourth kill is aimed at the end of a run, when the output is complete and
takes its name. Attempts are forks of this process, which has everything imported, so a kill hits the
work and not the start of an interpreter. Exit code 1 if anything differs::

    python benchmarks/resume_kills.py --kills 200
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from machine import describe, print_table, write_json

from mxquant.cli import quantize, quantize_tables  # noqa: F401  (what a command imports when it runs)
from mxquant.cli.main import main as mxquant_main
from mxquant.convert import pipeline

THREADS = 2
# Every so many kills, one waits until the output is complete and then this long at most, in seconds.
AIMED, AIMED_SECONDS = 4, 0.004
SIDE_FILES = 60
SIZES = {
    "vocab_size": 512, "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE = {**SIZES, "num_experts_per_tok": 2, "num_local_experts": 8, "num_hidden_layers": 3}
STATES = ("no shard finished", "shards finished", "all but the report", "output complete", "taking its name")


@dataclass(frozen=True)
class Case:
    """``source``: a name in ``SOURCES``; ``options`` of the command; ``replace``: over an older output."""

    name: str
    source: str
    options: str
    replace: bool = False


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=False), {"max_shard_size": "2MB"}),
    "llama tied": (lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
    "mixtral": (lambda: hf.MixtralConfig(**MIXTURE), {"max_shard_size": "4MB"}),
    "gpt-oss": (lambda: hf.GptOssConfig(**MIXTURE, head_dim=64, sliding_window=32), {}),
}
CASES = (
    Case("default, sharded source", "llama", "--max-shard-size 120KB"),
    Case("nvfp4, groups over shards", "llama", "--format nvfp4 --max-shard-size 60KB"),
    Case("four-over-six, tied", "llama tied", "--scale e4m3 --scale-rule four-over-six --max-shard-size 120KB"),
    Case("stochastic", "llama", "--rounding stochastic --seed 7 --block 32x32 --max-shard-size 120KB"),
    Case("one shard", "llama tied", "--format mxfp4"),
    Case("replaces an output", "llama tied", "--format mxfp4 --max-shard-size 200KB --overwrite", replace=True),
    Case("mixture, matrix by matrix", "mixtral", "--format nvfp4 --max-shard-size 600KB"),
    Case("mixture, stacked experts", "gpt-oss", "--scale ue5m3 --block 8 --max-shard-size 2MB"),
)


@dataclass
class Outcome:
    """What happened to one case."""

    case: Case
    seconds: float
    shards: int
    runs: int = 0
    kills: int = 0
    missed: int = 0
    kept: list[int] = field(default_factory=list)
    states: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many must hit a run (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "resume_kills.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork; attempts have their own
    about, rng = describe(), random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="resume-kills-") as name:
        outcomes = measure(Path(name), args.kills, rng)
    show(outcomes)
    write_json(args.json, {**about, "seed": args.seed, **summary(outcomes)})
    sys.exit(any(outcome.wrong for outcome in outcomes))


def measure(work: Path, kills: int, rng: random.Random) -> list[Outcome]:
    """All cases in turns, one run each, until there are enough kills."""
    for name in SOURCES:
        make_source(work / "sources" / name, *SOURCES[name])
    trials = [Trial(work / f"case{number}", work / "sources" / case.source, case) for number, case in enumerate(CASES)]
    while (done := sum(trial.outcome.kills for trial in trials)) < kills:
        trial = min(trials, key=lambda trial: trial.outcome.kills)
        trial.run(rng)
        print(f"\r{done} kills", end="", flush=True, file=sys.stderr)
    print("\r", end="", file=sys.stderr)
    return [trial.outcome for trial in trials]


def make_source(folder: Path, config: Callable[[], Any], options: dict[str, Any]) -> None:
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config()).to(torch.bfloat16).save_pretrained(folder, **options)
    for number in range(SIDE_FILES):
        (folder / f"side_{number}.txt").write_text(f"carried along {number}\n" * 500)


class Trial:
    """Runs of one case, in a folder of their own."""

    def __init__(self, folder: Path, source: Path, case: Case):
        self._case, self._out = case, folder / "out"
        self._command = ["quantize", str(source), "--out", str(self._out), *case.options.split(), "--json"]
        self._log = folder.with_suffix(".log")
        folder.mkdir()
        if case.replace:
            self._undisturbed(["quantize", str(source), "--out", str(self._out), "--scale", "e4m3", "--json"])
            self._out.rename(folder.with_suffix(".old"))
        seconds = [self._time(folder) for _ in range(2)]
        self._expected = contents(self._out)
        shards = len(list(self._out.glob("*.safetensors")))
        self.outcome = Outcome(case, statistics.median(seconds), shards)

    def run(self, rng: random.Random) -> None:
        """Kill attempts until one comes through, and look at what it left."""
        self._prepare()
        outcome = self.outcome
        outcome.runs += 1
        while True:
            aimed = (outcome.kills + outcome.missed) % AIMED == 0
            attempt = Attempt([*self._command, "--resume"], self._log)
            if aimed:
                attempt.wait_for(self._out.with_name("out.partial") / "model" / "config.json")
                time.sleep(rng.uniform(0, AIMED_SECONDS))
            else:
                time.sleep(rng.uniform(0, outcome.seconds))
            if not attempt.kill():
                outcome.missed += 1
                break
            outcome.kills += 1
            state, finished = look(self._out)
            outcome.states[state] += 1
            outcome.kept.append(finished)
        if attempt.code:
            outcome.wrong.append(f"exit code {attempt.code}: {self._log.read_text()[-500:]}")
        found = contents(self._out)
        outcome.wrong += [name for name in {**found, **self._expected} if found.get(name) != self._expected.get(name)]
        outcome.wrong += [f"left over: {path.name}" for path in self._out.parent.iterdir() if path != self._out]

    def _time(self, folder: Path) -> float:
        self._prepare()
        return self._undisturbed(self._command)

    def _undisturbed(self, command: list[str]) -> float:
        attempt = Attempt(command, self._log)
        began = time.perf_counter()
        if attempt.wait():
            sys.exit(f"mxquant {' '.join(command)} failed:\n{self._log.read_text()}")
        return time.perf_counter() - began

    def _prepare(self) -> None:
        folder = self._out.parent
        shutil.rmtree(folder)
        folder.mkdir()
        if self._case.replace:
            shutil.copytree(folder.with_suffix(".old"), self._out)


class Attempt:
    """A command in a fork of this process; made when its plan is, and the work begins."""

    def __init__(self, command: list[str], log: Path):
        ready, begin = os.pipe()
        self._pid = os.fork()
        self.code: int | None = None
        if not self._pid:
            _child(command, log, begin)
        os.close(begin)
        os.read(ready, 1)  # nothing, at once, if the command ends before
        os.close(ready)

    def wait_for(self, path: Path) -> None:
        """Until the path exists or the command has ended."""
        while not path.exists() and not self._ended():
            pass

    def kill(self) -> bool:
        """Whether there was something to kill."""
        if self._ended():
            return False
        os.kill(self._pid, signal.SIGKILL)
        self.wait()
        return self.code == -signal.SIGKILL

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.code

    def _ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None


def _child(command: list[str], log: Path, begin: int) -> None:
    run_plan = pipeline.run_plan

    def beginning(*args: Any, **kwargs: Any) -> Any:
        os.write(begin, b".")
        return run_plan(*args, **kwargs)

    code = 70
    try:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(THREADS)
        pipeline.run_plan = beginning
        mxquant_main(command, standalone_mode=False)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def look(out: Path) -> tuple[str, int]:
    """What a kill left, and how many finished shards are in it."""
    work = out.with_name("out.partial")
    if not work.exists() or (out.exists() and not (work / "model").exists()) or (work / "replaced").exists():
        return STATES[4], 0
    try:
        finished = len(json.loads((work / "manifest.json").read_text())["finished"])
    except FileNotFoundError:
        finished = 0
    files = {path.name for path in (work / "model").iterdir()} if (work / "model").exists() else set()
    if "config.json" in files:
        return STATES[3], finished
    if "side_0.txt" in files:
        return STATES[2], finished
    return STATES[1 if finished else 0], finished


def contents(folder: Path) -> dict[str, str]:
    """Checksum of every file; folders count too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        )
    return found


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    total: collections.Counter[str] = sum((o.states for o in outcomes), collections.Counter())
    return {
        "kills": sum(o.kills for o in outcomes),
        "runs": sum(o.runs for o in outcomes),
        "runs_that_differ": sum(bool(o.wrong) for o in outcomes),
        "found_after_kills": {state: total[state] for state in STATES},
        "cases": [
            {
                "case": o.case.name,
                "options": o.case.options,
                "shards": o.shards,
                "seconds_undisturbed": round(o.seconds, 4),
                "runs": o.runs,
                "kills": o.kills,
                "finished_shards_at_kills": round(statistics.fmean(o.kept), 1) if o.kept else None,
                "found_after_kills": {state: o.states[state] for state in STATES},
                "wrong": o.wrong,
            }
            for o in outcomes
        ],
    }


def show(outcomes: list[Outcome]) -> None:
    rows = [
        [o.case.name, str(o.shards), f"{1e3 * o.seconds:.0f} ms", str(o.runs), str(o.kills)]
        + [str(o.states[state]) for state in STATES]
        + [str(len(o.wrong)) if o.wrong else "all equal"]
        for o in outcomes
    ]
    print_table(["case", "shards", "undisturbed", "runs", "kills", *STATES, "bytes"], rows)
    for o in outcomes:
        for wrong in o.wrong[:5]:
            print(f"{o.case.name}: {wrong}")
    print(f"\n{sum(o.kills for o in outcomes)} kills in {sum(o.runs for o in outcomes)} runs.")


if __name__ == "__main__":
    main()
