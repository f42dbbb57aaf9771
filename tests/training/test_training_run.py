"""Runs on the Trainer: resumed after a kill, stopped when they diverge, and handed over to ``quantize``."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mxquant
from mxquant.errors import MXQuantError
from mxquant.training import RECIPES, LinearFormats, TrainingRecipe, functional
from mxquant.training.callbacks import divergence
from mxquant.training.conversion import weights_only
from mxquant.training.data import Windows, pack
from mxquant.training.run import QUANT_RECIPE, RunSettings, train

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = torch.randint(0, 16, (24, 32), generator=torch.Generator().manual_seed(0))
SETTINGS = RunSettings(steps=8, batch_size=2, grad_accum=2, warmup=2, save_every=3, eval_every=4, monitor_every=4)


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("recipe", ["mxfp4-1d-tf-sr", "fp4-2d"])
def test_a_killed_run_resumes_to_the_same_curve_and_the_same_weights(tmp_path, recipe):
    def kill(row):
        if row["step"] == 5:
            raise KilledError

    whole = train(make_model(), recipe, WINDOWS, SETTINGS, tmp_path / "whole", eval_windows=WINDOWS[:4])
    with pytest.raises(KilledError):
        train(make_model(), recipe, WINDOWS, SETTINGS, tmp_path / "cut", eval_windows=WINDOWS[:4], report=kill)
    assert (tmp_path / "cut" / "checkpoint-3").is_dir()
    (tmp_path / "cut" / "checkpoint-4").mkdir()  # cut off while it was written
    rows: list[dict] = []
    options = {"eval_windows": WINDOWS[:4], "resume": True, "report": rows.append}
    resumed = train(make_model(seed=1), recipe, WINDOWS, SETTINGS, tmp_path / "cut", **options)
    assert rows[0]["step"] == 4
    assert resumed.curve == whole.curve
    assert (resumed.loss, resumed.eval_loss) == (whole.loss, whole.eval_loss)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = train(make_model(), recipe, WINDOWS, SETTINGS, tmp_path / "cut", **options)
    assert again.to_dict() == resumed.to_dict()


def test_the_curve_has_what_is_asked_for(tmp_path):
    result = train(make_model(), "mxfp4-1d", WINDOWS, SETTINGS, tmp_path / "run", eval_windows=WINDOWS[:4])
    steps = [row for row in result.curve if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert [row["step"] for row in result.curve if "eval_loss" in row] == [4, 8]
    monitored = [row for row in steps if "mismatch" in row]
    assert [row["step"] for row in monitored] == [1, 5]
    assert all(0.1 < row["saturated"] < 0.9 and row["mismatch"] > 0.01 for row in monitored)
    assert result.loss == steps[-1]["loss"] < steps[0]["loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["curve"] == result.curve


def test_gradient_checkpointing_changes_no_number(tmp_path):
    short = replace(SETTINGS, steps=3)
    plain = train(make_model(), "fp4-2d", WINDOWS, short, tmp_path / "plain")
    again = train(make_model(), "fp4-2d", WINDOWS, replace(short, gradient_checkpointing=True), tmp_path / "again")
    assert [row["loss"] for row in plain.curve] == [row["loss"] for row in again.curve]
    assert [row["grad_norm"] for row in plain.curve] == [row["grad_norm"] for row in again.curve]


def test_a_learning_rate_that_diverges_is_reported(tmp_path):
    wild = replace(SETTINGS, steps=60, lr=30.0, save_every=0, eval_every=0)
    result = train(make_model(), "fp4-2d", WINDOWS, wild, tmp_path / "run", eval_windows=WINDOWS[:4])
    assert result.problem is not None
    assert result.problem.startswith("step ")
    assert (result.loss, result.eval_loss) == (None, None)
    assert result.steps < 60
    assert not (tmp_path / "run" / "model.safetensors").exists()
    text = (tmp_path / "run" / "result.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["problem"] == result.problem


def test_weights_that_are_not_finite_are_reported_at_the_first_step(tmp_path):
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = math.nan
    result = train(model, "fp4-2d", WINDOWS, SETTINGS, tmp_path / "run")
    assert result.problem == "step 1: the loss is nan"


def test_what_counts_as_divergence():
    falling = [5 - 0.1 * i for i in range(30)]
    assert divergence(falling) is None
    assert divergence([*falling, math.inf]) == "the loss is inf"
    assert divergence(falling, math.nan) == "the gradient norm is nan"
    assert divergence([*falling, 8.0]) is None  # one spike is none
    assert "rose from" in divergence([*falling, *[4.0] * 10])
    assert divergence([*falling, *[falling[-1] + 0.5] * 10]) is None
    assert "rose from 4.000 to" in divergence([4.0, *[5.1] * 12])  # never any better than the start


def test_other_options_and_other_runs_are_refused(tmp_path):
    short = replace(SETTINGS, steps=1)
    train(make_model(), "fp4-2d", WINDOWS, short, tmp_path)
    with pytest.raises(MXQuantError, match="holds a run already; pass --resume"):
        train(make_model(), "fp4-2d", WINDOWS, short, tmp_path)
    for changes in ({"recipe": "mxfp4-1d"}, {"settings": replace(short, lr=1.0)}, {"windows": WINDOWS[1:]}):
        given = {"recipe": "fp4-2d", "windows": WINDOWS, "settings": short} | changes
        with pytest.raises(
            MXQuantError, match=f"made with other {'data' if 'windows' in changes else next(iter(changes))}"
        ):
            train(make_model(), folder=tmp_path, resume=True, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"lr": -1.0}, "learning rate"),
        ({"dtype": "float8"}, "unknown dtype"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(MXQuantError, match=message):
        replace(SETTINGS, **changes)


def test_windows_come_in_an_order_that_the_seed_alone_decides():
    data = Windows(WINDOWS, seed=1, count=60)
    assert len(data) == 60
    order = [int((data[i]["input_ids"] == WINDOWS).all(1).nonzero()) for i in range(60)]
    assert sorted(order[:24]) == sorted(order[24:48]) == list(range(24))
    assert order[:24] != order[24:48]
    backwards = [int((data[i]["input_ids"] == WINDOWS).all(1).nonzero()) for i in reversed(range(60))]
    assert backwards == order[::-1]
    other = Windows(WINDOWS, seed=2, count=60)
    assert any(not torch.equal(data[i]["input_ids"], other[i]["input_ids"]) for i in range(24))


def test_documents_are_packed_without_loss_up_to_the_last_window():
    assert pack([[1, 2, 3], [4, 5], [6, 7]], 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(MXQuantError, match="has 2 tokens, fewer than one window of 3"):
        pack([[1, 2]], 3)


@pytest.mark.parametrize("name", ["fp4-2d", "ue5m3-2d", "fp4-2d-qk8"])
def test_the_checkpoint_quantizes_to_the_weights_of_the_training_forward(tmp_path, monkeypatch, name):
    """Bit for bit; and with the activations of training, the packed model has its loss."""
    model = make_model()
    train(model, name, WINDOWS, replace(SETTINGS, steps=2, save_every=0, eval_every=0), tmp_path / "trained")
    seen: dict[str, torch.Tensor] = {}
    original = functional.decode

    def spy(parts, scheme, shape, dtype):
        values = original(parts, scheme, shape, dtype)
        seen[last["operand"]] = values
        return values

    last: dict[str, str] = {}
    encode = functional.encode
    monkeypatch.setattr(functional, "decode", spy)
    monkeypatch.setattr(
        functional, "encode", lambda x, s, operand, n: (last.update(operand=operand), encode(x, s, operand, n))[1]
    )
    ids = WINDOWS[:2].to(torch.int64)
    loss = model(input_ids=ids, labels=ids).loss.detach()

    recipe = mxquant.QuantRecipe.from_file(tmp_path / "trained" / QUANT_RECIPE)
    mxquant.quantize_model(tmp_path / "trained", tmp_path / "packed", recipe)
    packed = mxquant.load(tmp_path / "packed")
    layers = {n: m for n, m in packed.named_modules() if isinstance(m, mxquant.QuantLinear)}
    assert len(layers) == 7
    for module, layer in layers.items():
        assert torch.equal(layer.dequantize().view(torch.int32), seen[f"{module}/weight"].view(torch.int32))

    mxquant.dequantize_model(tmp_path / "packed", tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    as_trained = model.model.layers[0].mlp.up_proj.formats
    assert isinstance(as_trained, LinearFormats)
    only = lambda formats: formats.map(lambda role, scheme: scheme if role == "activation" else None)  # noqa: E731
    rules = tuple(replace(r, formats=only(r.formats)) for r in RECIPES[name].rules)
    activations = TrainingRecipe("activations", only(RECIPES[name].default), rules)
    mxquant.training.convert(dense, activations)
    assert torch.equal(dense(input_ids=ids, labels=ids).loss, loss)
    with weights_only(model):
        alone = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(packed(input_ids=ids, labels=ids).loss, alone, rtol=1e-5, atol=0)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, loss)
