"""``mxquant eval`` and ``mxquant demo`` as their users meet them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import mxquant
import mxquant.bundled
from mxquant.cli import demo
from mxquant.cli.main import main

BUNDLED = str(mxquant.bundled.path())
QUICK = ("--text", "builtin", "--seq-len", "128", "--windows", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-ue5m3"
    mxquant.quantize_model(BUNDLED, folder, mxquant.QuantScheme(scale="ue5m3", block=16))
    return folder


def invoke(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_json_has_everything_and_nothing_else_is_on_standard_output(quantized, tmp_path):
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = invoke("eval", quantized, "--baseline", BUNDLED, *QUICK, "--json", "--output", output, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert report["schema_version"] == 1
    assert set(report["versions"]) == {"mxquant", "python", "torch", "transformers", "lm_eval"}
    assert len(report["text"]["sha256"]) == 64
    assert (report["settings"]["seq_len"], report["settings"]["windows"]) == (128, 2)
    dense, packed = report["models"]
    assert (dense["is_baseline"], dense["scheme"], dense["bits_per_weight"]) == (True, "dense bfloat16", None)
    assert (packed["name"], packed["scheme"]) == ("tiny-ue5m3", "fp4-ue5m3-b16")
    assert packed["bits_per_weight"] == pytest.approx(4.5)
    assert packed["weight_bytes"] < 0.5 * dense["weight_bytes"]
    assert packed["disk_bytes"] == (quantized / "model.safetensors").stat().st_size
    measured = packed["perplexity"]
    assert (measured["windows"], measured["tokens"], measured["bos"]) == (2, 2 * 127, True)
    assert set(measured["divergence"]) == {
        *("kl", "kl_interval", "top1_agreement", "top1_agreement_interval"),
        *("perplexity_ratio", "perplexity_ratio_interval"),
    }
    ratio = measured["perplexity"] / dense["perplexity"]["perplexity"]
    assert measured["divergence"]["perplexity_ratio"] == pytest.approx(ratio)
    assert 0.9 < ratio < 1.2


def test_the_table_names_models_text_and_protocol(quantized):
    result = invoke("eval", quantized, "--baseline", BUNDLED, *QUICK)
    assert result.exit_code == 0, result.stderr
    for words in ("tiny-ue5m3", "fp4-ue5m3-b16", "baseline", "same top-1", f"Python {sys.version.split()[0]}"):
        assert words in result.stdout
    assert "2 windows of 128 tokens, each after a BOS token: 254 predicted tokens" in result.stdout


def test_models_of_one_name_are_told_apart_and_need_no_baseline(quantized, tmp_path):
    copy = tmp_path / "other" / quantized.name
    shutil.copytree(quantized, copy)
    result = invoke("eval", quantized, copy, *QUICK, "--json")
    rows = json.loads(result.stdout)["models"]
    assert [row["name"] for row in rows] == [str(quantized), str(copy)]
    assert rows[0]["perplexity"]["perplexity"] == rows[1]["perplexity"]["perplexity"]
    assert rows[0]["perplexity"]["divergence"] is None


def test_tasks_alone_need_no_text(quantized, tmp_path):
    (tmp_path / "items.jsonl").write_text('{"q": "Return the", "a": ["value", "of of"]}\n' * 3)
    (tmp_path / "task.yaml").write_text(
        f"task: my_items\ndataset_path: json\ndataset_kwargs:\n  cache_dir: {tmp_path}/cache\n"
        f"  data_files: {{validation: {tmp_path}/items.jsonl}}\nvalidation_split: validation\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{a}}"\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc}]\n"
    )
    arguments = ("--no-perplexity", "--tasks", "my_items", "--include-path", tmp_path, "--limit", 2)
    result = invoke("eval", quantized, "--baseline", BUNDLED, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["text"] is None
    for row in report["models"]:
        assert row["perplexity"] is None
        against = None if row["is_baseline"] else {"value": 0.0, "stderr": 0.0}
        figures = {"value": 1.0, "stderr": 0.0, "higher_is_better": True, "cached": False, "difference": against}
        assert row["tasks"]["my_items"]["acc"] == figures
    table = invoke("eval", quantized, "--baseline", BUNDLED, *arguments).stdout
    assert "1.0000 ± 0.0000" in table
    assert "+0.0000 ± 0.0000" in table
    assert "baseline" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder or hub id: ./nowhere"),
        (["nobody/has-this-model"], "no such folder or hub id: nobody/has-this-model"),
        (["{tmp}"], "has no config.json"),
        (["{tmp}/file"], "is a file"),
        (["{broken}"], "cannot load {broken}"),
        (["{partial}"], "lacks tensor model.norm.weight"),
        (["{bundled}", "--text", "{tmp}/none.txt"], "no text file"),
        (["{bundled}", "--text", "{tmp}/file"], "is empty"),
        (["{bundled}", "--seq-len", "4096"], "--seq-len 4096 is more than the 512 positions of"),
        (["{bundled}", "--device", "abacus"], "device 'abacus' is not available"),
        (["{bundled}", "--plot", "{tmp}/picture.gif"], "pictures are written as .png, .pdf, .svg"),
        (["{bundled}", "--tasks", "x", "--include-path", "{tmp}/none"], "is not a folder"),
    ],
)
def test_what_fails_is_one_line_and_exit_code_1(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    names = {"tmp": tmp_path, "bundled": BUNDLED, "broken": tmp_path / "broken", "partial": tmp_path / "partial"}
    if "{broken}" in arguments:
        shutil.copytree(BUNDLED, names["broken"])
        (names["broken"] / "model.safetensors").write_bytes(b"no weights")
    if "{partial}" in arguments:
        _without_norm(names["partial"])
    text = () if "--text" in arguments else ("--text", "builtin", "--windows", 1)
    result = invoke("eval", *(a.format(**names) for a in arguments), *text)
    assert result.exit_code == 1
    assert message.format(**names) in result.stderr
    assert [line for line in result.stderr.splitlines() if line.strip()] == [result.stderr.strip()]
    assert result.stdout == ""


def _without_norm(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(BUNDLED, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        ([BUNDLED, "--limit", "3"], "--limit requires --tasks"),
        ([BUNDLED, "--no-perplexity"], "--no-perplexity requires --tasks"),
        ([BUNDLED, "--windows", "0"], "--windows"),
        ([BUNDLED, "--dtype", "int8"], "--dtype"),
        ([BUNDLED, "--output", "no/such/folder.json"], "there is no folder no/such"),
        ([BUNDLED, "--output", "/"], "is a folder"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, message):
    result = invoke("eval", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_without_finite_logits_is_marked_and_fails_the_command(quantized, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(BUNDLED, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    result = invoke("eval", broken, quantized, *QUICK)
    assert result.exit_code == 1
    assert "none" in result.stdout
    assert "Error: broken: its logits are not finite in window 0" in result.stderr
    rows = json.loads(invoke("eval", broken, quantized, *QUICK, "--json").stdout)["models"]
    assert rows[0]["perplexity"]["perplexity"] is None
    assert rows[1]["perplexity"]["perplexity"] > 1


def test_help_imports_nothing_slow():
    code = "import sys, mxquant.cli.eval, mxquant.cli.demo; print([m for m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for slow in ("torch", "transformers", "lm_eval", "matplotlib", "scipy", "datasets", "rich"):
        assert f"'{slow}'" not in loaded


def test_the_demo_compares_four_schemes_and_replaces_only_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_WINDOWS", 2)
    monkeypatch.setattr(demo, "_SAMPLE_TOKENS", 4)
    out = tmp_path / "demo"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for _ in range(2):
        result = invoke("demo", "--out", out)
        assert result.exit_code == 0, result.stderr
    folders = {"fp4-ue5m3-b16", "mxfp4", "nvfp4", "fp4-e4m3-b16"}
    assert {path.name for path in out.iterdir()} == {*folders, "demo.png", "mine.txt"}
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    for words in (*folders, "bundled model", "sample from dense", "sha256", "first 2 windows", "even for e8m0"):
        assert words in result.stdout
    report = json.loads(invoke("demo", "--out", out, "--json").stdout)
    assert report["models"][0]["name"] == "bundled model"
    assert set(report["samples"]) == {"dense", "fp4-ue5m3-b16"}
