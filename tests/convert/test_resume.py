"""A quantization that was killed and resumed leaves the bytes of one that was not; all else is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.checkpoint import fingerprint as F
from mxquant.checkpoint.reader import Checkpoint
from mxquant.checkpoint.writer import ShardWriter
from mxquant.cli.main import main
from mxquant.convert import pipeline
from mxquant.convert.manifest import finished_shards
from mxquant.convert.work_folder import work_folder
from mxquant.errors import CheckpointError, WeightError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
UE5M3 = QuantScheme(scale="ue5m3", block=16)
NVFP4 = QuantScheme.preset("nvfp4")
SHARD = 9000


def contents(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def places(folder: Path) -> dict[str, tuple[int, int]]:
    """What a file that is written again would have another of."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("*.safetensors")}


@contextlib.contextmanager
def stopped_after(writes: int, error: type[BaseException] = KeyboardInterrupt):  # type: ignore[no-untyped-def]
    """Runs stop with an error at that write to a shard."""
    original, count = ShardWriter.write, 0

    def write(self, *args):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count > writes:
            raise error("stopped")
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", write)
        yield


def quantize(source: Path, out: Path, scheme=UE5M3, **options):  # type: ignore[no-untyped-def]
    return mxquant.quantize_model(source, out, scheme, **{"max_shard_bytes": SHARD, **options})


def interrupt(source: Path, out: Path, scheme=UE5M3, writes: int = 25, **options) -> Path:  # type: ignore[no-untyped-def]
    """Leave an interrupted run behind; returns its work folder."""
    with stopped_after(writes), pytest.raises(KeyboardInterrupt):
        quantize(source, out, scheme, **options)
    work = out.with_name(out.name + ".partial")
    assert finished_shards(work) >= 2
    assert not out.exists()
    return work


@pytest.fixture
def source(make_checkpoint, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama", "bfloat16", "20KB"), folder)
    return folder


@pytest.fixture
def child(make_checkpoint, tmp_path):
    """``child(kind, scheme, max_shard_bytes, ...)`` -> what tests/helpers/resume_child.py found."""

    def run(kind: str, scheme: str, max_shard_bytes: int, *, random_kills: int = 0, old: Path | None = None):
        source = make_checkpoint(kind, "bfloat16")
        request = {
            "source": str(source), "scheme": scheme, "max_shard_bytes": max_shard_bytes, "folder": str(tmp_path),
            "random_kills": random_kills, "old": None if old is None else str(old),
        }  # fmt: skip
        script = Path(__file__).parents[1] / "helpers" / "resume_child.py"
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(request)],
            capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")
class TestKills:
    def test_at_every_step_that_touches_a_file(self, child):
        found = child("llama-even", "nvfp4", 20_000)
        assert not found["wrong"]
        assert found["kills"] == len(found["steps"])
        steps = Counter(found["steps"])
        # Each shard takes its name, all but the last are listed, and so does the output.
        assert steps["os.rename"] >= 1 + 2 * 2 + 1 + 1
        assert steps["fsync"] >= 3
        assert steps["write"] > 5
        assert {"open", "fcntl.flock", "os.mkdir", "os.remove", "os.rmdir"} <= steps.keys()

    def test_at_every_step_of_replacing_an_output(self, child, make_checkpoint, tmp_path):
        old = tmp_path / "old"
        quantize(make_checkpoint("llama-tied"), old, "mxfp4")
        found = child("llama-tied", "ue5m3/8", 1 << 30, old=old)
        assert not found["wrong"]
        assert found["kills"] == len(found["steps"])

    def test_at_random_moments(self, child):
        found = child("mixtral-even", "e4m3+global/16/stochastic", 8000, random_kills=6)
        assert found["kills"] >= 6
        assert not found["wrong"]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("llama", QuantScheme(scale="e4m3", block=16, scale_rule="four-over-six")),
        ("llama-tied", QuantScheme(scale="ue5m3", block=(8, 8), rounding="stochastic")),
        ("llama-even", NVFP4),
        ("gpt2", QuantScheme.preset("mxfp6")),
        ("mixtral", NVFP4),
        ("llama4", QuantScheme(scale="e4m3", block=16, global_scale=True)),
        ("gpt-oss", QuantScheme.preset("mxfp4")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_resumed_output_is_that_of_an_undisturbed_run_and_finished_shards_stay(
    kind, scheme, make_checkpoint, tmp_path
):
    source = make_checkpoint(kind, "bfloat16", "20KB")
    expected = quantize(source, tmp_path / "expected", scheme, seed=3)
    work = interrupt(source, tmp_path / "out", scheme, seed=3)
    before = places(work / "model")
    (work / "model" / "half.safetensors.partial").write_bytes(b"half")
    said: list[str] = []
    report = quantize(source, tmp_path / "out", scheme, seed=3, resume=True, notify=said.append)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert before.items() <= places(tmp_path / "out").items()
    assert said == [f"Resuming: {len(before)} of {len(report.plan.shards)} shards are finished."]
    assert 0 < report.resumed_parameters < report.plan.parameters
    assert report.stats == expected.stats
    assert sorted(p.name for p in tmp_path.iterdir()) == ["expected", "out"]


def test_pytorch_files_are_a_source_to_resume_from(source, tmp_path):
    tensors = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in source.glob("*.safetensors*"):
        file.unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    quantize(source, tmp_path / "expected")
    interrupt(source, tmp_path / "out")
    quantize(source, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def _retrain(source: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[1]
    tensors = load_file(file)
    name = next(name for name, t in tensors.items() if t.ndim == 2)
    tensors[name][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def _edit(name: str, text: str):  # type: ignore[no-untyped-def]
    return lambda source: (source / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_retrain, r"the source's model-00002-of-\d+\.safetensors has changed"),
        (_edit("tokenizer_config.json", "{}"), "the source's tokenizer_config.json has changed"),
        (_edit("chat_template.jinja", "new"), "the source's chat_template.jinja is new"),
        (lambda source: (source / "tokenizer_config.json").unlink(), "the source's tokenizer_config.json is gone"),
    ],
    ids=["weights", "side file", "new file", "lost file"],
)
def test_a_changed_source_is_refused(change, message, source, tmp_path):
    work = interrupt(source, tmp_path / "out")
    before = contents(work)
    change(source)
    with pytest.raises(CheckpointError, match=rf"cannot resume .*out\.partial: {message}.*--overwrite"):
        quantize(source, tmp_path / "out", resume=True)
    assert contents(work) == before
    quantize(source, tmp_path / "expected")
    quantize(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": NVFP4}, r"the recipe: model\.\S+ was ue5m3/16 \(default\), is nvfp4 \(default\)"),
        ({"scheme": QuantScheme(rounding="stochastic")}, r"is ue5m3/16/stochastic \(default\)"),
        ({"scheme": QuantRecipe(default=UE5M3, exclude=("down_proj",))}, "was ue5m3/16 .default., is dense"),
        ({"scheme": QuantRecipe(default=UE5M3, kv_cache="ue5m3/16")}, "the recipe: KV cache was none, is ue5m3/16"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"max_shard_bytes": 2 * SHARD}, "--max-shard-size has changed"),
    ],
    ids=["scheme", "rounding", "exclude", "kv cache", "seed", "shard size"],
)
def test_another_recipe_is_refused(options, message, source, tmp_path):
    work = interrupt(source, tmp_path / "out")
    before = contents(work)
    with pytest.raises(CheckpointError, match=message) as caught:
        quantize(source, tmp_path / "out", **{"scheme": UE5M3, **options}, resume=True)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(work) == before


def test_another_version_is_refused(source, tmp_path, monkeypatch):
    interrupt(source, tmp_path / "out")
    versions = pipeline.versions()
    monkeypatch.setattr(pipeline, "versions", lambda: {**versions, "torch": "9.9"})
    with pytest.raises(
        CheckpointError, match=rf"the version of torch was {versions['torch']}, is 9\.9".replace("+", r"\+")
    ):
        quantize(source, tmp_path / "out", resume=True)


def test_without_resume_finished_work_is_lost_only_if_asked_for(source, tmp_path):
    work = interrupt(source, tmp_path / "out")
    before = contents(work)
    with pytest.raises(CheckpointError, match=r"finished shards; --resume continues it, --overwrite starts over"):
        quantize(source, tmp_path / "out")
    assert contents(work) == before
    quantize(source, tmp_path / "out", NVFP4, overwrite=True)
    quantize(source, tmp_path / "expected", NVFP4)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert not work.exists()


@pytest.mark.parametrize("damage", ["truncated", "rewritten", "header", "missing"])
def test_a_finished_shard_that_is_no_longer_what_it_was_is_written_again(damage, source, tmp_path):
    quantize(source, tmp_path / "expected")
    work = interrupt(source, tmp_path / "out")
    kept, shard = sorted((work / "model").glob("*.safetensors"))[:2]
    status, data = shard.stat(), shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        changed = {"truncated": data[:-1], "rewritten": data[:-1] + b"\xff", "header": b"\x00" * 8 + data[8:]}
        shard.write_bytes(changed[damage])
    if damage == "header":  # nothing else tells
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    before, said = places(work / "model")[kept.name], []
    quantize(source, tmp_path / "out", resume=True, notify=said.append)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert places(tmp_path / "out")[kept.name] == before
    assert f"written again: {shard.name}, changed since" in said[0]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format_version": 99}', '{"format_version": 1, "identity": {}, "finished": []}']
)
def test_a_damaged_manifest_is_refused_by_name(text, source, tmp_path):
    work = interrupt(source, tmp_path / "out")
    (work / "manifest.json").write_text(text)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged .*--overwrite") as caught:
            quantize(source, tmp_path / "out", resume=resume)
        assert len(str(caught.value).splitlines()) == 1
    quantize(source, tmp_path / "out", overwrite=True)
    assert not work.exists()


def test_nothing_to_resume_starts_anew_and_says_so(source, tmp_path):
    said: list[str] = []
    quantize(source, tmp_path / "expected")
    quantize(source, tmp_path / "out", resume=True, notify=said.append)
    assert said == [f"Nothing to resume in {tmp_path / 'out.partial'}; starting over."]
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_complete_output_is_left_alone_if_it_is_the_one_asked_for(source, tmp_path):
    first = quantize(source, tmp_path / "out")
    before, said = places(tmp_path / "out"), []
    again = quantize(source, tmp_path / "out", resume=True, notify=said.append)
    assert said == [f"{tmp_path / 'out'} is already complete; nothing to do."]
    assert again.stats == first.stats
    assert again.to_file() == first.to_file()
    assert places(tmp_path / "out") == before
    for options in ({"seed": 1}, {"scheme": NVFP4}, {"max_shard_bytes": 2 * SHARD}):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            quantize(source, tmp_path / "out", resume=True, **options)
    shard = next((tmp_path / "out").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        quantize(source, tmp_path / "out", resume=True)
    shard.write_bytes(whole)
    assert quantize(source, tmp_path / "out", resume=True).stats == first.stats
    _retrain(source)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        quantize(source, tmp_path / "out", resume=True)


def test_errors_leave_nothing_behind_unless_the_run_can_be_resumed_on_purpose(source, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out.partial"
    with stopped_after(25, WeightError), pytest.raises(WeightError):
        quantize(source, out)
    assert not work.exists()
    with stopped_after(1), pytest.raises(KeyboardInterrupt):
        quantize(source, out)
    assert not work.exists()  # no shard was finished
    with stopped_after(25, WeightError), pytest.raises(WeightError):
        quantize(source, out, resume=True)
    assert finished_shards(work) >= 2
    quantize(source, tmp_path / "expected")
    quantize(source, out, resume=True)
    assert contents(out) == contents(tmp_path / "expected")


def test_two_processes_do_not_work_on_one_output(source, tmp_path):
    interrupt(source, tmp_path / "out")
    before = contents(tmp_path)
    with work_folder(tmp_path / "out"):
        for options in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(CheckpointError, match=r"another process is writing to .*out\.partial"):
                quantize(source, tmp_path / "out", **options)
    assert contents(tmp_path) == before
    quantize(source, tmp_path / "out", resume=True)


def test_a_work_folder_has_one_owner_however_often_it_comes_and_goes(tmp_path):
    inside, most, entered, errors = [], [], [], []

    def work() -> None:
        turns = 0
        while turns < 25 and not errors:
            try:
                with work_folder(tmp_path / "out") as folder:
                    inside.append(1)
                    most.append(len(inside))
                    (folder.path / "notes").touch()
                    folder.clear()
                    turns += 1
                    entered.append(1)
                    inside.pop()
            except CheckpointError as error:
                if "another process" not in str(error):
                    errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert max(most) == 1
    assert len(entered) == 4 * 25
    assert not list(tmp_path.iterdir())


def test_an_output_that_a_killed_run_had_put_aside_comes_back(source, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out.partial"
    quantize(source, out)
    old = contents(out)
    work.mkdir()
    out.rename(work / "replaced")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize(source, out, NVFP4)
    assert contents(out) == old
    assert not work.exists()


def test_of_large_files_pieces_and_the_time_of_the_last_change_tell(tmp_path, source, monkeypatch):
    for name, value in {"_WHOLE": 2000, "_HEAD": 100, "_PIECE": 10, "_PIECES": 20}.items():
        monkeypatch.setattr(F, name, value)
    checkpoint = Checkpoint(source)
    file = max(source.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    before, data, status = F.fingerprint(checkpoint)[file.name], file.read_bytes(), file.stat()
    assert before["bytes"] == len(data) > 2000

    def changed_at(place: int) -> dict[str, object]:
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return F.fingerprint(checkpoint)[file.name]

    pieces = {(len(data) - 10) * piece // 20 + i for piece in range(1, 21) for i in range(10)} | set(range(100))
    assert len(data) - 1 in pieces
    for place in (0, 50, 99, len(data) - 1, *sorted(pieces)[100::17]):
        assert changed_at(place) != before
    assert changed_at(next(i for i in range(len(data)) if i not in pieces)) == before
    os.utime(file)
    assert F.fingerprint(checkpoint)[file.name] != before
    assert "mtime_ns" not in F.fingerprint(checkpoint)["config.json"]
    assert F.without_times({file.name: before}) == {file.name: {k: before[k] for k in ("bytes", "sha256")}}


class TestCommand:
    def _run(self, source: Path, out: Path, *args: str):  # type: ignore[no-untyped-def]
        return CliRunner().invoke(main, ["quantize", str(source), "-o", str(out), "--max-shard-size", "9KB", *args])

    def test_interrupted_then_resumed(self, source, tmp_path):
        out = tmp_path / "out"
        with stopped_after(25):
            stopped = self._run(source, out)
        assert stopped.exit_code == 130
        count = finished_shards(tmp_path / "out.partial")
        assert f"{count} of " in stopped.stderr
        assert "--resume continues from there" in stopped.stderr
        refused = self._run(source, out)
        assert refused.exit_code == 1
        assert "--resume" in refused.stderr
        resumed = self._run(source, out, "--resume")
        assert resumed.exit_code == 0
        assert f"Resuming: {count} of " in resumed.stderr
        again = self._run(source, out, "--resume", "--json")
        assert again.exit_code == 0
        assert "already complete" in again.stderr
        report = json.loads(again.stdout)
        assert report["parameters_per_second"] == 0
        assert report["resumed_parameters"] == report["parameters"]
        self._run(source, tmp_path / "expected")
        assert contents(out) == contents(tmp_path / "expected")
