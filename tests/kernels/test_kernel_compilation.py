"""Every Triton kernel compiles for every supported chip, and became what it was written to become.

No GPU is needed. The work is that of ``benchmarks/kernel_table.py``, in a process of its own because
tests run Triton's interpreter. ``--full-parity`` compiles every format and every tile.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHIPS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
MATRIX = {
    "sm_80": "HMMA",
    "sm_90": "HGMMA",
    "sm_100": "UTCHMMA",
    "sm_120": "HMMA",
    "gfx942": "v_mfma",
    "gfx950": "v_mfma",
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module", params=CHIPS)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, full: bool) -> list[dict]:
    """The figures of all kernels on one chip."""
    path = tmp_path_factory.mktemp("figures") / "table.json"
    command = [sys.executable, ROOT / "benchmarks" / "kernel_table.py", "--chip", request.param, "--json", path]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), *(["--full"] if full else [])],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


def name(row: dict) -> str:
    return f"{row['chip']} {row['kernel']} {row['scheme']}"


def test_no_kernel_spills_registers_and_all_fit_into_shared_memory(rows):
    assert not [name(r) for r in rows if r["spills"]]
    assert not [name(r) for r in rows if r["shared"] > r["shared_limit"]]


def test_products_of_matrices_use_the_tensor_cores(rows):
    products = [
        r for r in rows if r["kernel"].startswith(("linear", "gradient", "grouped")) and " 1 [" not in r["kernel"]
    ]
    assert len(products) >= 10
    assert not [name(r) for r in products if not any(m.startswith(MATRIX[r["chip"]]) for m in r["matrix"])]


def test_fp4_times_fp4_is_the_block_scaled_instruction_where_the_chip_has_one(rows):
    expected = {"sm_100": "UTCOMMA", "sm_120": "OMMA", "gfx950": "v_mfma_scale"}
    native = [r for r in rows if r["kernel"].startswith("native")]
    assert bool(native) == (rows[0]["chip"] in expected)
    assert not [name(r) for r in native if not any(m.startswith(expected[r["chip"]]) for m in r["matrix"])]


def test_packed_bytes_are_loaded_16_at_a_time(rows):
    readers = [r for r in rows if r["packed_load"] and not r["kernel"].startswith("native")]
    assert {r["kernel"].split()[0] for r in readers} == {"linear", "gradient", "grouped", "dequantize"}
    assert not [name(r) for r in readers if r["packed_load"] != 16 or "16" not in r["loads"]]


def test_quantize_divides_exactly(rows):
    quantizers = [r for r in rows if r["kernel"] == "quantize"]
    assert quantizers
    assert not [name(r) for r in quantizers if r["approximate_divisions"]]
