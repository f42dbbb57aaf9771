"""``mxquant quantize`` and ``dequantize`` as typed: plan, report, JSON, errors and exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mxquant.cli.main import main


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def test_dry_run_shows_every_tensor_and_writes_nothing(make_checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run("quantize", make_checkpoint("llama-tied"), "-o", out, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert len(plan["tensors"]) == 1 + 2 * 9 + 1
    assert all(t["scheme"] or t["reason"] for t in plan["tensors"])
    assert not out.exists()
    text = run("quantize", make_checkpoint("llama-tied"), "-o", out, "--dry-run").output
    for word in ("embedding", "norm", "tied to model.embed_tokens.weight", "bits per weight", "On disk"):
        assert word in text


def test_options_reach_the_scheme(make_checkpoint, tmp_path):
    args = ("--scale", "e4m3", "--block", "8x8", "--global-scale", "--scale-rule", "ceil", "--rounding", "stochastic")
    result = run("quantize", make_checkpoint("llama"), "-o", tmp_path / "out", *args, "--json")
    assert result.exit_code == 0, result.output
    (scheme,) = json.loads(result.stdout)["schemes"].values()
    assert scheme == {
        "element": "fp4_e2m1", "scale": "e4m3", "block": [8, 8], "global_scale": True, "scale_rule": "ceil",
        "rounding": "stochastic",
    }  # fmt: skip


def test_a_preset_can_be_changed(make_checkpoint, tmp_path):
    result = run("quantize", make_checkpoint("llama"), "-o", tmp_path / "out", "--format", "nvfp4", "--scale-rule",
                 "four-over-six", "--dry-run", "--json")  # fmt: skip
    schemes = {t["scheme"] for t in json.loads(result.stdout)["tensors"]} - {None}
    assert len(schemes) == 1
    assert "four-over-six" in schemes.pop()


def test_stdout_is_json_alone_and_the_report_with_figures_of_the_run(make_checkpoint, tmp_path):
    result = run("quantize", make_checkpoint("llama"), "-o", tmp_path / "out", "--json")
    report, saved = json.loads(result.stdout), json.loads((tmp_path / "out/quantization_report.json").read_text())
    of_the_run = {"out", "seconds", "parameters_per_second", "resumed_parameters"}
    of_the_run |= {"peak_anonymous_bytes", "base_anonymous_bytes"}
    assert {name: report[name] for name in report.keys() - of_the_run} == saved
    assert not of_the_run & saved.keys()


def test_recipe_file_and_exclude_work_together(make_checkpoint, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rules:\n  - q_proj|k_proj: mxfp8\ndefault: {scale: ue5m3, block: 16}\n")
    result = run("quantize", make_checkpoint("llama"), "--recipe", recipe, "--exclude", "down_proj", "--dry-run",
                 "--json")  # fmt: skip
    plan = json.loads(result.stdout)
    assert plan["out"].endswith("-mine")
    schemes = {t["name"].split(".")[-2]: t["scheme"] for t in plan["tensors"]}
    assert schemes["q_proj"] == "mxfp8"
    assert schemes["down_proj"] is None
    assert "ue5m3" in schemes["up_proj"]


def test_dequantize_writes_a_model_and_refuses_a_dense_one(make_checkpoint, tmp_path):
    source = make_checkpoint("llama")
    run("quantize", source, "-o", tmp_path / "q")
    result = run("dequantize", tmp_path / "q", tmp_path / "d", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "d/model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size
    again = run("dequantize", source, tmp_path / "e")
    assert again.exit_code == 1
    assert "not quantized" in again.stderr


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (("./no-such-folder",), "no such folder", 1),
        (("no-such/model",), "no-such/model", 1),
        (("SOURCE", "--block", "1"), "at least 2", 1),
        (("SOURCE", "--block", "3x"), "3x", 1),
        (("SOURCE", "--scale", "e8m0", "--scale-rule", "absmax"), "choose from floor", 1),
        (("SOURCE", "--exclude", "no_such_layer"), "no_such_layer", 1),
        (("SOURCE", "--exclude", "("), "regular expression", 1),
        (("SOURCE", "--recipe", "nowhere.yaml"), "nowhere.yaml", 1),
        (("SOURCE", "--device", "no-such-device"), "no-such-device", 1),
        (("SOURCE", "--include", "embed_tokens"), "names model.embed_tokens, which cannot be quantized", 1),
        (("SOURCE", "--scale", "e9m9"), "e9m9", 2),
        (("SOURCE", "--max-shard-size", "lots"), "lots", 2),
    ],
)
def test_bad_requests_give_one_clear_line(args, message, code, make_checkpoint, tmp_path):
    args = [str(make_checkpoint("llama")) if a == "SOURCE" else a for a in args]
    result = run("quantize", *args, "-o", tmp_path / "out")
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
    if code == 1:
        assert len(result.stderr.strip().splitlines()) == 1
