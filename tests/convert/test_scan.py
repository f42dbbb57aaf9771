"""What a plan says before the work about weights that do not fit the scale format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from broken_inputs import run
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.convert.pipeline import plan_model
from mxquant.inspection.verify import verify_checkpoint

K = "model.layers.1.self_attn.k_proj.weight"
UP, GATE, DOWN = (f"model.layers.0.mlp.{p}_proj.weight" for p in ("up", "gate", "down"))


@pytest.fixture
def changed(make_checkpoint, tmp_path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    def make(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        shutil.copytree(make_checkpoint("llama-even"), tmp_path / "source")
        tensors = load_file(tmp_path / "source/model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
        return tmp_path / "source"

    return make


def one_outlier(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP][3, 5] = 3e4


def test_one_weight_that_zeroes_the_rest_and_its_fused_partner_is_warned_of(changed, tmp_path):
    source = changed(one_outlier)
    _, plan = plan_model(source, "nvfp4/absmax")
    (warning,) = plan.warnings
    assert UP in warning
    assert GATE in warning
    assert DOWN not in warning
    assert "3e+04" in warning
    report = mxquant.quantize_model(source, tmp_path / "q", "nvfp4/absmax")
    lost = {name: s.zero_scales + s.subnormal_scales for name, s in report.stats.items()}
    assert all(lost[name] > 0.9 * report.stats[name].blocks for name in (UP, GATE))
    assert f"{lost[GATE] / report.stats[GATE].blocks:.0%} of {GATE}" in warning


def test_no_report_is_headed_by_what_one_weight_makes_look_good(changed, tmp_path):
    source = changed(one_outlier)
    done = run("quantize", source, "-o", tmp_path / "q", "--scheme", "nvfp4/absmax")
    assert done.exit_code == 0
    report = json.loads((tmp_path / "q/quantization_report.json").read_text())
    assert report["sqnr_db"] > 60  # of all weights together, the outlier's square is nearly all
    assert report["worst_relative_error"]["value"] > 0.5
    assert report["worst_relative_error"]["layer"] == GATE
    assert report["worst_zero_scales"]["share"] > 0.5
    assert report["mean_relative_error"] > 0.1
    for text in (done.stdout, (tmp_path / "q/README.md").read_text()):
        assert "dB" not in text.partition("Relative error:")[2]
        assert GATE in text
        assert f"{report['mean_relative_error']:.4f}" in text


@pytest.mark.parametrize(("width", "clipped"), [(688_128.0, False), (700_000.0, True), (1e30, True)])
def test_weights_past_the_end_of_ue5m3_are_warned_of(width, clipped, changed):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][0, 0] = width

    _, plan = plan_model(changed(change), "ue5m3/16")
    assert [UP in w and "688128" in w for w in plan.warnings] == [True] * clipped


def test_one_narrow_tensor_among_wide_ones_is_named(changed):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, t in tensors.items():
            t *= 5e-2 if name == K else 10 if t.ndim == 2 else 1

    source = changed(change)
    (warning,) = plan_model(source, "e4m3/16/absmax")[1].warnings
    assert f"most in {K} (100%)" in warning
    assert not plan_model(source, "ue5m3/16")[1].warnings


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "ue5m3/16", "e4m3+global/8", "mxfp8"])
def test_ordinary_weights_are_not_warned_of(text, make_checkpoint):
    assert not plan_model(make_checkpoint("llama-even"), text)[1].warnings


def test_reports_are_valid_json_for_weights_of_any_width(changed, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] *= 1e-22
        tensors[DOWN] *= 1e21

    mxquant.quantize_model(changed(change), tmp_path / "q", "e4m3/16/absmax")
    text = (tmp_path / "q/quantization_report.json").read_text()
    found = {t["name"]: t for t in json.loads(text, parse_constant=pytest.fail)["tensors"]}
    assert found[UP]["relative_error"] == 1.0
    assert 0 < found[DOWN]["relative_error"] <= 1.0
    assert run("verify", tmp_path / "q", "--source", tmp_path / "source", "--all").exit_code == 0


def test_an_error_below_the_rounding_of_fp32_is_no_fault(changed, tmp_path):
    """Beside one weight of 3e38 the others do not count: what is left of the error is that of the report's sums."""

    def one_huge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[K] = tensors[K].bfloat16()
        tensors[K][3, 5] = 3e38

    source = changed(one_huge)
    mxquant.quantize_model(source, tmp_path / "q", "nvfp4")
    assert not verify_checkpoint(tmp_path / "q", source, samples=None, load=False).faults
