"""What a diagnosis says of weights, against scipy, the quantizer's own report and models that really run."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxquant.bundled
from mxquant import quantize, quantize_model
from mxquant.analysis.advice import advice
from mxquant.analysis.defaults import SCHEMES
from mxquant.analysis.examine import diagnose, examine, prepare
from mxquant.analysis.export import headline, to_dict
from mxquant.analysis.recipes import to_yaml
from mxquant.analysis.sensitivity import Calibration, Sensitivity
from mxquant.analysis.statistics import WeightStats
from mxquant.cli.main import main
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError, MXQuantError, PlanError, SchemeError, WeightError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

pytestmark = pytest.mark.usefixtures("one_thread")

MIXABLE = ("ue5m3/32", "ue5m3/16", "ue5m3/8", "mxfp6")


@pytest.fixture(scope="module")
def bundled():
    return diagnose(mxquant.bundled.path())


@pytest.fixture(scope="module")
def gaussian(tmp_path_factory):
    """``gaussian(sigma)`` -> folder of a model whose weights are N(0, sigma^2) and large enough to average over."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    def make(sigma: float):
        folder = tmp_path_factory.mktemp("gaussian")
        config = LlamaConfig(vocab_size=32, num_hidden_layers=1, hidden_size=256, num_attention_heads=4,
                             intermediate_size=512, initializer_range=sigma, num_key_value_heads=4)  # fmt: skip
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


def copy_with(source, target, change):
    """A copy of a checkpoint folder whose tensors went through ``change(name, tensor)``."""
    tensors = {name: change(name, t).contiguous() for name, t in load_file(source / "model.safetensors").items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


# --- moments


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_moments_are_scipys_however_the_tensor_is_cut(scale):
    x = torch.tensor(scipy.stats.t(5).rvs((40, 50), random_state=0) + 0.3, dtype=torch.float32) * scale
    cuts = (0, 1, 3, 20, 40)
    found = sum((WeightStats.of(x[a:b]) for a, b in itertools.pairwise(cuts)), WeightStats())
    flat = x.double().numpy().ravel()
    assert found.count == flat.size
    assert found.mean == pytest.approx(flat.mean(), rel=1e-5)
    assert found.sigma == pytest.approx(flat.std(), rel=1e-5)
    assert found.kurtosis == pytest.approx(scipy.stats.kurtosis(flat / scale, fisher=False), rel=1e-5)
    assert found.peak == pytest.approx(abs(flat).max() / flat.std(), rel=1e-5)


def test_moments_of_nothing_and_of_constants():
    assert WeightStats().sigma == WeightStats().kurtosis == WeightStats().peak == 0
    zero = WeightStats.of(torch.zeros(3, 4))
    assert (zero.sigma, zero.kurtosis, zero.peak) == (0, 0, 0)


# --- measured and predicted errors


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("scheme", ["nvfp4", "e4m3/8/absmax", "ue5m3/4x4", "mxfp6"])
def test_measured_errors_are_those_that_quantizing_reports(make_checkpoint, tmp_path, kind, scheme):
    found = diagnose(make_checkpoint(kind), [scheme])
    report = quantize_model(make_checkpoint(kind), tmp_path / "out", scheme, allow_dense=True)
    assert report.stats.keys() == {m.tensor.name for m in found.matrices}
    for name, stats in report.stats.items():
        members = [m for m in found.matrices if m.tensor.name == name]
        measured = found.measured(found.schemes[0], members).stats
        assert measured.error == pytest.approx(stats.error, rel=1e-6)
        assert (measured.zero_scales, measured.subnormal_scales) == (stats.zero_scales, stats.subnormal_scales)
    assert found.bits_per_weight(found.schemes[0]) == pytest.approx(report.plan.bits_per_weight, rel=0.01)


@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_predictions_are_right_for_gaussian_weights(gaussian, sigma):
    found = diagnose(gaussian(sigma))
    for m in found.matrices:
        assert m.weights.kurtosis == pytest.approx(3, abs=0.1)
        for scheme in found.schemes:
            predicted = found.predictions[m.name][scheme]
            assert m.measured[scheme].mse == pytest.approx(predicted, rel=0.03), (m.name, scheme.text)


def test_predictions_follow_e4m3_down_to_where_it_loses_blocks(gaussian):
    schemes = ("e4m3/8/absmax", "e4m3/16/absmax", "e4m3/8", "e4m3/8/four-over-six")
    found = diagnose(gaussian(0.003), schemes)
    for scheme in found.schemes:
        measured = found.measured(scheme)
        assert measured.stats.zero_scales + measured.stats.subnormal_scales == measured.stats.blocks
        assert measured.mse == pytest.approx(found.predicted_mse(scheme), rel=0.05), scheme.text


def test_predictions_are_within_a_tenth_on_a_trained_model(bundled):
    for m in bundled.matrices:
        if abs(m.weights.kurtosis - 3) < 0.5:
            for scheme in bundled.schemes:
                predicted = bundled.predictions[m.name][scheme]
                assert m.measured[scheme].mse == pytest.approx(predicted, rel=0.1), (m.name, scheme.text)


def test_a_sample_is_near_the_whole_and_looks_at_less(bundled):
    scheme = QuantScheme.parse("ue5m3/16")
    sampled = examine(prepare(mxquant.bundled.path(), [scheme]), sample=0.2)
    part, whole = sampled.measured(scheme), bundled.measured(scheme)
    assert 0.1 < part.stats.elements / whole.stats.elements < 0.4
    assert part.mse == pytest.approx(whole.mse, rel=0.05)


def test_the_model_does_not_run(bundled, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a forward pass")

    monkeypatch.setattr(torch.nn.Module, "__call__", refuse)
    assert diagnose(mxquant.bundled.path(), ["ue5m3/16"]).parameters == bundled.parameters


# --- the mix and its recipe


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "mixtral", "gemma3"])
def test_the_recipe_plans_exactly_the_mix(make_checkpoint, tmp_path, kind):
    found = diagnose(make_checkpoint(kind), MIXABLE)
    mix = found.mix(4.9)
    assert len(set(mix.chosen.values())) > 1
    file = tmp_path / "mix.yaml"
    file.write_text(to_yaml(mix.recipe, headline(found, mix)))
    _, plan = plan_model(make_checkpoint(kind), QuantRecipe.from_file(file), allow_dense=True)
    assert {t.name: t.scheme for t in plan.quantized} == mix.chosen
    assert plan.bits_per_weight == pytest.approx(mix.bits_per_weight)
    assert mix.bits_per_weight <= 4.9


def test_include_and_exclude_are_part_of_the_recipe(make_checkpoint, tmp_path):
    folder = make_checkpoint("llama")
    found = examine(prepare(folder, MIXABLE, include=("layers", "lm_head"), exclude=(r"layers\.0",)))
    mix = found.mix(5.0)
    assert "lm_head.weight" in mix.chosen
    assert not any("layers.0" in name for name in mix.chosen)
    file = tmp_path / "mix.yaml"
    file.write_text(to_yaml(mix.recipe))
    _, plan = plan_model(folder, QuantRecipe.from_file(file))
    assert {t.name: t.scheme for t in plan.quantized} == mix.chosen


def test_the_mix_is_never_worse_than_a_single_scheme(bundled):
    costs = []
    for budget in (4.3, 4.5, 5.0, 6.0):
        mix, best = bundled.mix(budget), bundled.best(budget)
        assert mix.bits_per_weight <= budget
        assert mix.bound <= mix.cost <= bundled.total_cost(best)
        assert mix.cost == pytest.approx(sum(bundled.cost(m, mix.chosen[m.tensor.name]) for m in bundled.matrices))
        costs.append(mix.cost)
    assert costs == sorted(costs, reverse=True)


def test_projections_that_share_a_global_scale_share_their_scheme(make_checkpoint):
    # Global scales on both sides of the budget, so that some have to be in the mix.
    found = diagnose(make_checkpoint("llama"), ["e4m3+global/32", "e4m3+global/8", "e4m3+global/16/ceil"])
    mix = found.mix(4.8)
    assert len(set(mix.chosen.values())) > 1
    for layer in ("model.layers.0", "model.layers.1"):
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({mix.chosen[f"{layer}.{name}.weight"] for name in fused}) == 1


def test_schemes_of_one_size_and_worth_are_not_mixed(bundled):
    mix = bundled.mix(5.0)
    for bits in (4.5, 5.0):
        assert sum(bundled.bits_per_weight(s) == bits for s in set(mix.chosen.values())) <= 1


# --- words


def test_small_scales_are_named_with_their_cause_and_cures(gaussian):
    found = diagnose(gaussian(0.003), ["e4m3/8/absmax", "e4m3/16/absmax", "ue5m3/8/absmax", "ue5m3/16/absmax"])
    words = advice(found, found.mix(4.5))
    (eight,) = [w for w in words if "e4m3 scales at block 8 are zero" in w]
    stats = found.measured(found.schemes[0]).stats
    assert eight.startswith(f"{(stats.zero_scales + stats.subnormal_scales) / stats.blocks:.0%} of")
    assert "sigma is 0.003" in eight
    assert "use ue5m3/8/absmax" in eight
    (inverted,) = [w for w in words if w.startswith("Finer is worse")]
    assert "block 8 " in inverted
    assert "block 16" in inverted
    assert not any("ue5m3 scales" in w and "zero" in w for w in words)


def test_outliers_and_saturated_scales_are_named(make_checkpoint, tmp_path):
    def change(name, tensor):
        tensor = tensor.clone()
        if name == "model.layers.1.mlp.down_proj.weight":
            tensor[3, 5] = 30 * tensor.std()
        return tensor * 1e6 if name == "model.layers.0.self_attn.o_proj.weight" else tensor

    folder = copy_with(make_checkpoint("llama"), tmp_path / "changed", change)
    found = diagnose(folder, ["e4m3/8", "e4m3/32"])
    words = " ".join(advice(found, found.mix(5)))
    assert "model.layers.1.mlp.down_proj.weight (2" in words
    assert "are the largest there is" in words
    worst = next(m for m in found.matrices if m.name == "model.layers.0.self_attn.o_proj.weight")
    assert worst.measured[found.schemes[0]].saturated_scales == worst.measured[found.schemes[0]].stats.blocks


def test_all_zero_weights_are_no_trouble(make_checkpoint, tmp_path):
    folder = copy_with(make_checkpoint("llama"), tmp_path / "zero", lambda name, t: t * 0)
    found = diagnose(folder)
    mix = found.mix(4.5)
    assert mix.cost == 0
    json.dumps(to_dict(found, mix), allow_nan=False)


# --- calibration


def test_sensitivities_are_the_sums_of_squared_gradients(make_checkpoint):
    """Of a mixture too, against autograd's own gradients of the parameters."""
    from transformers import AutoModelForCausalLM

    from mxquant.evals import calibration

    for kind in ("gpt2", "mixtral"):
        net = AutoModelForCausalLM.from_pretrained(make_checkpoint(kind), dtype=torch.float32).eval()
        windows = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
        model = calibration.EvalModel(kind, kind, net, None)
        found = calibration._run(model, windows, torch.Generator().manual_seed(5), lambda done, total: None)
        generator = torch.Generator().manual_seed(5)
        expected: dict[str, torch.Tensor] = {}
        for window in windows:
            net.zero_grad()
            calibration._backward(net, window[None], generator)
            for name, p in net.named_parameters():
                if p.ndim > 1 and p.grad is not None:
                    expected[name] = expected.get(name, 0) + p.grad.double().square()
        matrices = 0
        for (name, expert), sums in found.items():
            squares = expected[name] if expert is None else expected[name][expert]
            squares = squares.T if kind == "gpt2" and "lm_head" not in name else squares
            torch.testing.assert_close(sums.rows, squares.sum(1), rtol=1e-4, atol=0)
            torch.testing.assert_close(sums.columns, squares.sum(0), rtol=1e-4, atol=0)
            matrices += 1
        assert matrices >= {"gpt2": 8, "mixtral": 2 * (4 + 2 * 2)}[kind]


@pytest.fixture(scope="module")
def calibrated():
    """``kl(weights)`` on another part of the text, sensitivities and a diagnosis of the bundled model, its weights."""
    from mxquant.evals.calibration import calibrate
    from mxquant.evals.models import load_model
    from mxquant.evals.text import load_text
    from mxquant.evals.windows import cut_windows

    torch.set_num_threads(1)
    subject = prepare(mxquant.bundled.path(), ["ue5m3/16", "ue5m3/32", "ue5m3/8", "mxfp6"])
    model, text = load_model(mxquant.bundled.path(), dtype="float32", device="cpu"), load_text("builtin")
    calibration = calibrate(model, text, subject.plan.quantized, windows=16, seq_len=128)
    windows = cut_windows(model.tokenizer, text, 128, 24)[16:]
    weights = {t.name: model.model.get_parameter(t.name).data for t in subject.plan.quantized}

    @torch.inference_mode()
    def predictions():
        return torch.log_softmax(model.model(windows, use_cache=False).logits.float(), -1)

    before = predictions()

    def kl(changed):
        """In nats per token, of the model with other weights from itself."""
        for name, weight in changed.items():
            model.model.get_parameter(name).data = weight
        after = predictions()
        for name in changed:
            model.model.get_parameter(name).data = weights[name]
        return float((before.exp() * (before - after)).sum(-1).mean())

    return kl, calibration, examine(subject, calibration=calibration), weights


def test_expected_kl_is_that_of_models_with_errors_in_their_weights(calibrated):
    kl, calibration, _, weights = calibrated
    generator = torch.Generator().manual_seed(0)
    ratios = {}
    for name, weight in weights.items():
        if ".layers.1." in name or ".layers.3." in name:
            error = torch.randn(weight.shape, generator=generator) * 0.05 * weight.std()
            ratios[name] = kl({name: weight + error}) / calibration.sensitivity[name].cost(error, 0)
    assert len(ratios) == 14
    assert 0.5 < min(ratios.values()) < max(ratios.values()) < 2, ratios
    assert np.std(np.log(list(ratios.values()))) < 0.25


def test_the_calibrated_mix_has_less_kl_than_one_scheme_of_its_size(calibrated):
    kl, _, found, weights = calibrated
    best, mix = found.best(4.5), found.mix(4.5)
    single, mixed = (
        kl({name: quantize(weights[name], scheme).dequantize() for name, scheme in chosen.items()})
        for chosen in (dict.fromkeys(mix.chosen, best), mix.chosen)
    )
    assert found.total_cost(best) == pytest.approx(single, rel=0.35)
    assert mix.cost == pytest.approx(mixed, rel=0.35)
    assert mixed < 0.9 * single


def test_cost_adds_up_over_chunks_and_samples(calibrated):
    _, calibration, found, _ = calibrated
    scheme = found.schemes[0]
    sampled = examine(prepare(mxquant.bundled.path(), [scheme]), calibration=calibration, sample=0.25)
    assert sampled.total_cost(scheme) == pytest.approx(found.total_cost(scheme), rel=0.2)


def test_matrices_that_no_token_reached_are_taken_to_be_like_the_others_and_named(make_checkpoint):
    folder = make_checkpoint("llama")
    subject = prepare(folder, ["ue5m3/16", "ue5m3/8"])
    like = {t.name: Sensitivity(torch.rand(t.matrix[0]), torch.rand(t.matrix[1])) for t in subject.plan.quantized}
    lost = "model.layers.1.mlp.up_proj.weight"
    known = {name: s for name, s in like.items() if name != lost}
    found = examine(subject, calibration=Calibration("text", 9, known))
    assert found.assumed == [lost]
    assert any(lost in sentence for sentence in advice(found, found.mix(4.8)))
    first, second = (
        next(m for m in found.matrices if m.name == f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)
    )
    expected = like["model.layers.0.mlp.up_proj.weight"]
    weight = subject.checkpoint.read(lost).float()
    error = quantize(weight, found.schemes[0]).dequantize() - weight
    assert found.cost(second, found.schemes[0]) == pytest.approx(expected.cost(error, 0), rel=1e-5)
    del known["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(MXQuantError, match=r"reaches model\.layers\.0\.mlp\.up_proj\.weight"):
        examine(subject, calibration=Calibration("text", 9, known))
    assert found.cost(first, found.schemes[0]) > 0


# --- bad input


def test_models_that_cannot_be_diagnosed(make_checkpoint, tmp_path):
    quantize_model(make_checkpoint("llama"), tmp_path / "quantized", "ue5m3/16")
    with pytest.raises(CheckpointError, match="already quantized"):
        diagnose(tmp_path / "quantized")
    with pytest.raises(CheckpointError, match="no such folder"):
        diagnose(tmp_path / "nowhere")
    with pytest.raises(SchemeError, match="'e9m9' is not a preset"):
        diagnose(make_checkpoint("llama"), ["e9m9/16"])
    with pytest.raises(
        SchemeError, match=r"blocks of 64 weights are larger than .*down_proj.weight, which has 36 input"
    ):
        diagnose(make_checkpoint("llama"), ["ue5m3/64"])
    with pytest.raises(PlanError, match=r"tiles \(8x8\) would lie across both"):
        diagnose(make_checkpoint("mixtral"), ["ue5m3/16", "ue5m3/8x8"])
    with pytest.raises(SchemeError, match="at least one scheme"):
        diagnose(make_checkpoint("llama"), [])
    with pytest.raises(SchemeError, match=r"no scheme fits 4.4 bits per weight; the smallest, ue5m3/16, needs 4\.5"):
        diagnose(make_checkpoint("llama-even"), ["ue5m3/16", "ue5m3/8"]).mix(4.4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(make_checkpoint, tmp_path, value):
    def change(name, tensor):
        if name == "model.layers.1.mlp.up_proj.weight":
            tensor = tensor.clone()
            tensor[7, 9] = value
        return tensor

    folder = copy_with(make_checkpoint("llama"), tmp_path / "broken", change)
    with pytest.raises(WeightError, match=r"model.layers.1.mlp.up_proj.weight: (nan|inf) at row 7, column 9"):
        diagnose(folder)


# --- the command


def run(*args):
    return CliRunner().invoke(main, ["diagnose", *map(str, args)])


def test_the_command_prints_tables_and_writes_recipe_and_picture(make_checkpoint, tmp_path):
    recipe, plot = tmp_path / "mix.yaml", tmp_path / "maps.png"
    done = run(
        make_checkpoint("mixtral"),
        "--schemes",
        ",".join(MIXABLE),
        "--budget",
        5,
        "--recipe-out",
        recipe,
        "--plot",
        plot,
    )
    assert done.exit_code == 0, done.output
    found = ("Scale rules: ", "Best single scheme", "A mix at", "kurtosis", "Gaussian")
    for words in (*found, f"Wrote {recipe}.", f"Wrote {plot}."):
        assert words in done.stdout
    assert QuantRecipe.from_file(recipe).default is not None
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_has_every_figure_and_nothing_else_is_on_stdout(make_checkpoint):
    folder = make_checkpoint("llama")
    done = run(folder, "--schemes", "ue5m3/16,nvfp4,e4m3/8,mxfp4", "--rule", "absmax", "--budget", 5, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    # --rule is for schemes that name none and have it; presets name theirs.
    assert [s["scheme"] for s in record["schemes"]] == ["ue5m3/16/absmax", "nvfp4/absmax", "e4m3/8/absmax", "mxfp4"]
    found = diagnose(folder, [s["scheme"] for s in record["schemes"]])
    for entry, scheme in zip(record["schemes"], found.schemes, strict=True):
        assert entry["relative_error"] == pytest.approx(found.measured(scheme).mse ** 0.5)
        assert entry["predicted_relative_error"] == pytest.approx(found.predicted_mse(scheme) ** 0.5)
    assert [m["name"] for m in record["matrices"]] == [m.name for m in found.matrices]
    assert record["advice"]
    assert record["mix"]["bits_per_weight"] <= 5


def test_a_row_for_each_matrix_on_request(make_checkpoint):
    done = run(make_checkpoint("llama"), "--per-tensor", "--schemes", "ue5m3/16", "--budget", 5)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("self_attn.q_proj") == 2


def test_calibration_from_the_command_line(tmp_path):
    done = run(mxquant.bundled.path(), "--schemes", ",".join(MIXABLE), "--calibration", "builtin", "--windows", 2,
               "--seq-len", 64, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["calibration"] == {"text": "builtin", "tokens": 128}
    assert record["cost_unit"].startswith("expected KL")
    assert 0 < record["mix"]["cost"] < record["best"][1]["cost"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schemes", "ue5m3/16,,mxfp4"], "an empty item"),
        (["--schemes", "foo/16"], "'foo' is not a preset"),
        (["--schemes", "ue5m3/4096"], "larger than"),
        (["--budget", "2"], "no scheme fits 2 bits per weight"),
        (["--budget", "0"], "not in the range"),
        (["--sample", "0"], "not in the range"),
        (["--windows", "3"], "--windows requires --calibration"),
        (["--seq-len", "64"], "--seq-len requires --calibration"),
        (["--calibration", "no-such-file"], "no text file no-such-file; --calibration takes"),
        (["--plot", "maps.bmp"], "not as 'maps.bmp'"),
        (["--plot", "no/such/maps.png"], "there is no folder no/such"),
        (["--recipe-out", "."], "is a folder; give a file"),
        (["--exclude", "nothing-like-it"], "matches no module"),
    ],
)
def test_mistakes_are_one_clear_line(make_checkpoint, arguments, message):
    done = run(make_checkpoint("llama"), *arguments)
    assert done.exit_code in (1, 2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert message in line
    assert not done.stdout


def test_a_text_shorter_than_a_window_is_an_error(tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    done = run(mxquant.bundled.path(), "--calibration", tmp_path / "short.txt")
    assert done.exit_code == 1
    assert "fewer than one window of 512" in done.stderr


def test_help_lists_the_default_schemes():
    assert ", ".join(SCHEMES) in " ".join(run("--help").stdout.split())
