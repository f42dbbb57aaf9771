"""``mxquant sweep`` as its users meet it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import mxquant
import mxquant.bundled
from mxquant.cli.main import main

BUNDLED = str(mxquant.bundled.path())
QUICK = ("--text", "builtin", "--seq-len", "64", "--windows", "1", "--device", "cpu")


def invoke(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_json_is_all_of_standard_output_and_the_folder_has_four_files(tmp_path):
    arguments = ("--scales", "e4m3,bf16", "--blocks", "8,4x4", "--activations", "none,same", "--cache", tmp_path / "c")
    result = invoke("sweep", BUNDLED, *QUICK, *arguments, "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert found["schema_version"] == 1
    texts = [
        (c["spec"]["weights"]["scale"], c["spec"]["weights"]["block"], c["spec"]["inputs"]) for c in found["cells"]
    ]
    blocks = [(8, "none"), ([4, 4], "none"), (8, "same")]
    assert sorted(map(str, texts)) == sorted(str((scale, *b)) for scale in ("e4m3", "bf16") for b in blocks)
    assert len(list(csv.reader((tmp_path / "out" / "sweep.csv").open()))) == 1 + 1 + 6
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "sweep.svg").read_text()
    assert "weights only for 4x4" in found["notes"][0]
    lines = result.stderr.splitlines()
    assert [line.split("]")[0] for line in lines] == [f"[{i}/7" for i in range(1, 8)]
    again = invoke("sweep", BUNDLED, *QUICK, *arguments)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("(cached)") == 7
    for words in (
        "perplexity, weights and activations",
        "KL from the dense model",
        "e4m3 tiles",
        "1 window of 64 tokens",
    ):
        assert words in again.stdout


def test_a_dry_run_lists_cells_and_reads_no_model():
    result = invoke(
        "sweep", "no/such-model", "--preset", "is-finer-better", "--scales", "ue5m3,ue5m3-61440", "--dry-run"
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "ue5m3/2/absmax"
    assert "ue5m3-61440/256/absmax, activations same" in lines
    assert lines[-1] == "32 cells, and the dense model."
    found = json.loads(invoke("sweep", "m", "--dry-run", "--json", "--rules", "even").stdout)
    assert {cell["weights"]["scale"] for cell in found["cells"]} == {"e8m0"}
    assert found["notes"] == ["scale rule even does not exist for e4m3, e4m3+global, ue5m3, bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder or hub id: ./nowhere"),
        ([BUNDLED, "--scales", "e4m4"], "unknown scale 'e4m4'"),
        ([BUNDLED, "--blocks", "8,big"], "block 'big' is neither"),
        ([BUNDLED, "--rules", "best"], "unknown scale rule 'best'"),
        ([BUNDLED, "--activations", "ue5m3/8x8"], "activations cannot be quantized in tiles"),
        ([BUNDLED, "--text", "{tmp}/none.txt"], "no text file"),
        ([BUNDLED, "--seq-len", "4096"], "--seq-len 4096 is more than the 512 positions of"),
        ([BUNDLED, "--preset", "is-finer-better"], "--seq-len 2048 is more than the 512 positions of"),
        ([BUNDLED, "--jobs", "77"], "--jobs 77 needs 77 CUDA devices"),
        ([BUNDLED, "--cache", "{tmp}/file/c"], "cannot keep cells in"),
        ([BUNDLED, "--tasks", "x", "--include-path", "{tmp}/none"], "is not a folder"),
    ],
)
def test_what_fails_is_one_line_and_exit_code_1(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    text = () if "--text" in arguments else ("--text", "builtin")
    result = invoke("sweep", *(a.format(tmp=tmp_path) for a in arguments), *text)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        ([BUNDLED, "--windows", "some"], "neither a number of windows nor 'all'"),
        ([BUNDLED, "--windows", "0"], "neither a number of windows nor 'all'"),
        ([BUNDLED, "--limit", "3"], "--limit requires --tasks"),
        ([BUNDLED, "--scales", ","], "--scales is empty"),
        ([BUNDLED, "--preset", "paper"], "is-finer-better"),
        ([BUNDLED, "--jobs", "2", "--device", "cpu"], "cannot be combined with --device"),
        ([BUNDLED, "--output", __file__], "is a file"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, message):
    result = invoke("sweep", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_help_imports_nothing_slow():
    code = "import sys, mxquant.cli.sweep; print([m for m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for slow in ("torch", "transformers", "lm_eval", "matplotlib", "scipy", "datasets", "rich"):
        assert f"'{slow}'" not in loaded
