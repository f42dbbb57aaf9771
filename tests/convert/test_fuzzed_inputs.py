"""Files with random damage: a clean result or a one-line error, never a traceback, and nothing half-written.

Damage is drawn from a seed, so that a case that fails can be looked at again: the seed is its name.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from broken_inputs import printed_errors, run, tree

import mxquant

CASES = 100


def damage(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a few bytes changed, cut off, doubled, left out, or put in."""
    kind = rng.choice(("flip", "flip", "digit", "cut", "double", "remove", "insert", "zero"))
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 2, 8, 64))
    if kind == "cut":
        return data[:at]
    if kind == "double":
        return data[: at + length] + data[at:]
    if kind == "remove":
        return data[:at] + data[at + length :]
    if kind == "insert":
        return data[:at] + rng.randbytes(length) + data[at:]
    changed = bytearray(data)
    if kind == "digit":
        digits = [i for i, byte in enumerate(changed) if 48 <= byte < 58] or [0]
        changed[rng.choice(digits)] = rng.choice(b"0123456789-.e")
        return bytes(changed)
    for i in range(at, min(at + length, len(changed))):
        changed[i] = 0 if kind == "zero" else changed[i] ^ (1 << rng.randrange(8))
    return bytes(changed)


def damage_a_file(folder: Path, seed: int) -> str:
    """Damage one file of a checkpoint; headers of weights as often as their data. Returns its name."""
    rng = random.Random(seed)
    file = rng.choice(sorted(folder.iterdir()))
    data = file.read_bytes()
    head = min(len(data), 2000 if rng.random() < 0.5 else len(data))
    file.write_bytes(damage(data[:head], rng) + data[head:])
    return file.name


def is_clean_or_told(result) -> None:
    if result.exit_code:
        assert printed_errors(result)
    else:
        assert result.exception is None


@pytest.fixture(scope="module")
def quantized(good_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed") / "q"
    mxquant.quantize_model(good_checkpoint, folder, "ue5m3/16")
    return folder


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_sources(seed, good_checkpoint, tmp_path):
    folder = Path(shutil.copytree(good_checkpoint, tmp_path / "source"))
    damage_a_file(folder, seed)
    before = tree(tmp_path)
    result = run("quantize", folder, "-o", tmp_path / "out")
    is_clean_or_told(result)
    if result.exit_code:
        assert tree(tmp_path) == before


@pytest.mark.parametrize("seed", range(CASES, 2 * CASES))
def test_damaged_outputs(seed, quantized, tmp_path):
    folder = Path(shutil.copytree(quantized, tmp_path / "q"))
    damage_a_file(folder, seed)
    before = tree(tmp_path)
    is_clean_or_told(run("inspect", folder))
    found = run("verify", folder)
    assert found.exit_code in (0, 1) or "FAULT" in found.stdout
    assert found.exit_code != 1 or printed_errors(found)
    result = run("dequantize", folder, tmp_path / "out")
    is_clean_or_told(result)
    if result.exit_code:
        assert tree(tmp_path) == before
