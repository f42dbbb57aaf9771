"""``mxquant.evals.sweep``: cells against checkpoints of the same format, the cache, inversions."""

from __future__ import annotations

import csv
import io
import json
import math
import queue
import re

import numpy as np
import pytest
import torch
import transformers as hf
from rescale import rescale

import mxquant
import mxquant.bundled
from mxquant.errors import MXQuantError, SchemeError
from mxquant.evals.inplace import RememberingVariant, linear_weights
from mxquant.evals.models import load_model
from mxquant.evals.perplexity import evaluate
from mxquant.evals.sweep import cache
from mxquant.evals.sweep.cells import Bench, Cell, measure
from mxquant.evals.sweep.grid import PRESETS, CellSpec, Grid
from mxquant.evals.sweep.inversions import find_inversions, lines_of, number
from mxquant.evals.sweep.jobs import cuda_devices, run_share
from mxquant.evals.sweep.plots import plot_sweep, round_ticks
from mxquant.evals.sweep.run import sweep
from mxquant.evals.sweep.tables import sentences, tables, to_csv
from mxquant.evals.sweep.work import Done, Job, SweepSettings
from mxquant.evals.text import EvalText, load_text
from mxquant.schemes.formats import QuantScheme

QUICK = SweepSettings(seq_len=128, windows=2, batch_size=2, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def text():
    return load_text("builtin")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The bundled model with the same function and 16 times narrower weights (0.0045)."""
    folder = tmp_path_factory.mktemp("narrow")
    model = hf.AutoModelForCausalLM.from_pretrained(mxquant.bundled.path())
    rescale(model, factor=2.0**-4)
    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(mxquant.bundled.path()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inverted(narrow, text, tmp_path_factory):
    """A sweep of the narrow model, weights only and with activations."""
    grid = Grid(("e4m3", "e4m3+global", "ue5m3", "bf16"), (8, 16), inputs=("none", "same"))
    settings = SweepSettings(seq_len=256, windows=6, batch_size=6, device="cpu")
    return sweep(narrow, text, grid, settings, cache=tmp_path_factory.mktemp("cells"))


def cell(text: str, *nll: float, **figures: float) -> Cell:
    """A made-up cell; the perplexity follows from the windows' NLL."""
    scheme, _, inputs = text.partition(" ")
    spec = CellSpec(QuantScheme.parse(scheme), inputs or "none")
    return Cell(spec, math.exp(sum(nll) / len(nll)), None, list(nll), **figures)


def test_the_grid_is_the_product_without_what_does_not_exist():
    grid = Grid(
        scales=("e8m0", "e4m3+global", "bf16"),
        blocks=(8, (4, 4)),
        rules=("absmax", "search"),
        elements=("fp4_e2m1", "fp6_e2m3"),
        inputs=("none", "same", "ue5m3/16"),
    )
    cells, notes = grid.cells()
    # Elements, pairs of scale and rule, and the tile for weights only beside a block for all inputs.
    assert len(cells) == len(set(cells)) == 2 * 4 * (1 + 3)
    assert notes == [
        "scale rule absmax does not exist for e8m0",
        "scale rule search does not exist for bf16",
        "activations cannot be quantized in tiles (a token would see others); weights only for 4x4",
    ]
    assert all(CellSpec.from_dict(json.loads(json.dumps(c.to_dict()))) == c for c in cells)


def test_rules_of_the_paper_and_of_mxquant_have_a_name():
    def rules(rule: str) -> dict[str, str | None]:
        return {c.scale: c.weights.scale_rule for c in Grid(("e8m0", "e4m3", "ue5m3-61440"), (8,), (rule,)).cells()[0]}

    assert rules("paper") == {"e8m0": "even", "e4m3": "absmax", "ue5m3-61440": "absmax"}
    assert rules("default") == {"e8m0": "even", "e4m3": "search", "ue5m3-61440": "search"}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"scales": ("e4m4",)}, "unknown scale 'e4m4'"),
        ({"scales": ("e4m3+tensor",)}, r"unknown scale 'e4m3\+tensor'"),
        ({"rules": ("best",)}, "unknown scale rule 'best'"),
        ({"elements": ("fp5",)}, "unknown element format 'fp5'"),
        ({"blocks": (1,)}, "block 1 must be"),
        ({"inputs": ("ue5m3/8x8",)}, "tiles"),
        ({"inputs": ("some",)}, "'some' is not a preset"),
    ],
)
def test_names_that_do_not_exist_are_refused_at_once(axes, message):
    with pytest.raises(SchemeError, match=message):
        Grid(**{"scales": ("e4m3",), "blocks": (8,), **axes})


@pytest.mark.parametrize("scheme", ["e4m3/8/absmax", "nvfp4", "ue5m3/8x8/absmax"])
def test_a_cell_is_what_quantizing_and_evaluating_the_checkpoint_gives(scheme, narrow, text, tmp_path):
    spec = CellSpec(QuantScheme.parse(scheme))
    grid = Grid((spec.scale,), (spec.weights.block,), (str(spec.weights.scale_rule),))
    found = sweep(narrow, text, grid, QUICK, cache=tmp_path / "cells")
    (ours,) = found.cells
    report = mxquant.quantize_model(narrow, tmp_path / "q", spec.weights)
    dense = load_model(narrow, device="cpu", dtype="float32")
    packed = load_model(tmp_path / "q", device="cpu", dtype="float32")
    reference, theirs = evaluate([packed], text, baseline=dense, seq_len=128, windows=2)
    assert found.dense.perplexity == pytest.approx(reference.perplexity, rel=1e-6)
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-4)
    assert ours.kl == pytest.approx(theirs.divergence.kl, rel=2e-3)
    assert ours.ratio == pytest.approx(theirs.divergence.ratio, rel=1e-4)
    assert ours.agreement == pytest.approx(theirs.divergence.agreement, abs=0.01)
    assert ours.relative_error == pytest.approx(report.total.relative_error, rel=1e-5)
    assert ours.bits_per_weight == pytest.approx(packed.bits_per_weight)


def test_shares_of_small_scales_are_those_that_numpy_counts(narrow, text, tmp_path):
    (ours,) = sweep(narrow, text, Grid(("e4m3",), (16,)), QUICK, cache=tmp_path).cells
    model = hf.AutoModelForCausalLM.from_pretrained(narrow)
    weights = [w.detach().float().numpy() for name, w in model.named_parameters() if name.endswith("_proj.weight")]
    largest = np.concatenate([np.abs(w.reshape(-1, 16)).max(1) for w in weights]) / 6
    # Half of the smallest scale, 2^-9, rounds to the even neighbour, zero.
    assert ours.zero_scales == pytest.approx(np.mean(largest <= 2.0**-10), abs=1e-12)
    assert 0 < ours.zero_scales < ours.small_scales
    assert ours.small_scales == pytest.approx(np.mean(largest < 2.0**-6 * (1 - 2.0**-4)), abs=1e-12)


def test_on_narrow_weights_e4m3_inverts_and_a_global_scale_or_ue5m3_does_not(inverted):
    found = {(c.spec.scale, c.spec.block_size, c.spec.inputs): c for c in inverted.cells}
    assert [(i.line.name, i.line.inputs) for i in inverted.inversions] == [("e4m3", "none"), ("e4m3", "same")]
    for inputs in ("none", "same"):
        fine = {scale: found[scale, 8, inputs].perplexity for scale in ("e4m3", "e4m3+global", "ue5m3", "bf16")}
        assert fine["e4m3"] > 1.5 * fine["ue5m3"]
        assert fine["e4m3"] > 1.2 * found["e4m3", 16, inputs].perplexity
        for other in ("e4m3+global", "bf16"):
            assert fine["ue5m3"] == pytest.approx(fine[other], rel=0.01)
    assert found["ue5m3", 8, "same"].kl > 1.5 * found["ue5m3", 8, "none"].kl, "inputs are quantized, too"
    lines = sentences(inverted)
    assert lines[0].startswith("Finer is worse")
    pattern = r"e4m3: perplexity rises from [\d.]+ at 16 to [\d.]+ at 8; 100 % of blocks of 8 have a zero or subnormal"
    assert re.match(pattern, lines[1])


def test_the_same_model_as_it_was_trained_does_not_invert(text, tmp_path):
    grid = Grid(("e4m3",), (8, 16), inputs=("none", "same"))
    settings = SweepSettings(seq_len=256, windows=6, batch_size=6, device="cpu")
    found = sweep(mxquant.bundled.path(), text, grid, settings, cache=tmp_path)
    assert not found.inversions
    assert sentences(found)[0].startswith("No inversion")


def test_a_sweep_goes_on_where_it_was_interrupted(narrow, text, tmp_path):
    grid = Grid(("e4m3", "ue5m3"), (8, 16))
    seen: list[Done] = []

    def interrupt(done: Done) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(narrow, text, grid, QUICK, cache=tmp_path, on_done=interrupt)
    assert [done.cached for done in seen] == [False] * 3
    again: list[Done] = []
    resumed = sweep(narrow, text, grid, QUICK, cache=tmp_path, on_done=again.append)
    assert [done.cached for done in again] == [True, True, True, False, False]
    assert resumed.cells[0] == seen[1].cell
    larger: list[Done] = []
    sweep(narrow, text, Grid(("ue5m3", "e4m3"), (16, 8, 32)), QUICK, cache=tmp_path, on_done=larger.append)
    assert sum(done.cached for done in larger) == 5
    fresh = sweep(narrow, text, grid, QUICK, cache=tmp_path / "other")
    assert [c.window_nll for c in fresh.cells] == [c.window_nll for c in resumed.cells]
    assert not list(tmp_path.glob("*.partial"))


def test_cells_of_another_version_and_broken_ones_are_measured_again(narrow, text, tmp_path, monkeypatch):
    grid = Grid(("ue5m3",), (8, 16, 32))
    first = sweep(narrow, text, grid, QUICK, cache=tmp_path)
    assert first.notes == []
    dense, old, broken, untouched = (_file_of(tmp_path, c) for c in [first.dense, *first.cells])
    content = json.loads(old.read_text())
    content["made_by"]["mxquant"] = "0.0.9"
    content["cell"]["perplexity"] = 1.0
    old.write_text(json.dumps(content))
    broken.write_text(broken.read_text()[:100])
    seen: list[Done] = []
    second = sweep(narrow, text, grid, QUICK, cache=tmp_path, on_done=seen.append)
    assert [done.cached for done in seen] == [True, False, False, True]
    assert [c.perplexity for c in second.cells] == [c.perplexity for c in first.cells]
    assert second.notes == [
        "1 cached cell made by mxquant 0.0.9: measured again",
        "1 cached cell cannot be read: measured again",
    ]
    monkeypatch.setattr(cache, "made_by", lambda: {"mxquant": mxquant.__version__, "code": "new", "figures": "1"})
    notes = sweep(narrow, text, grid, QUICK, cache=tmp_path).notes
    assert notes == [f"4 cached cells made by mxquant {mxquant.__version__} with other code: measured again"]
    assert dense.exists()
    assert untouched.exists()


def _file_of(folder, cell: Cell):
    """The cache file that holds a cell."""
    for path in folder.glob("*.json"):
        if json.loads(path.read_text())["cell"] == json.loads(json.dumps(cell.to_dict())):
            return path
    raise AssertionError


@pytest.mark.parametrize("change", ["weights", "text", "windows", "dtype"])
def test_a_cached_cell_serves_nothing_but_what_it_was_measured_on(change, narrow, text, tmp_path):
    grid = Grid(("ue5m3",), (16,))
    settings = {"seq_len": 64, "windows": 1, "device": "cpu"}
    sweep(narrow, text, grid, SweepSettings(**settings), cache=tmp_path / "cells")
    model, words = narrow, text
    if change == "weights":
        model = tmp_path / "changed"
        changed = hf.AutoModelForCausalLM.from_pretrained(narrow)
        with torch.no_grad():
            changed.model.layers[2].mlp.up_proj.weight[3, 5] *= 2
        changed.save_pretrained(model)
        hf.AutoTokenizer.from_pretrained(narrow).save_pretrained(model)
    elif change == "text":
        words = EvalText("other", "Another text. " * 100)
    else:
        settings |= {"windows": 2} if change == "windows" else {"dtype": "float32"}
    seen: list[Done] = []
    sweep(model, words, grid, SweepSettings(**settings), cache=tmp_path / "cells", on_done=seen.append)
    assert not any(done.cached for done in seen)


def test_same_activations_are_found_by_their_own_name(narrow, text, tmp_path):
    sweep(narrow, text, Grid(("ue5m3",), (16,), inputs=("same",)), QUICK, cache=tmp_path)
    seen: list[Done] = []
    grid = Grid(("ue5m3",), (16,), inputs=("ue5m3/16/absmax", "ue5m3/16/search"))
    found = sweep(narrow, text, grid, QUICK, cache=tmp_path, on_done=seen.append)
    assert [done.cached for done in seen] == [True, True, False]
    assert [c.spec.inputs for c in found.cells] == ["ue5m3/16/absmax", "ue5m3/16/search"]


def test_a_cell_without_finite_logits_is_marked(make_checkpoint, tmp_path):
    """65504, the largest fp16 number, is 65536 in e8m0: infinite in fp16, and its input is zero."""
    model = hf.AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", "float16"))
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[0] = 0
        model.model.layers[0].self_attn.q_proj.weight[:, 0] = 65504
    model.save_pretrained(tmp_path / "m")
    _byte_tokenizer().save_pretrained(tmp_path / "m")
    words = EvalText("bytes", "abcd" * 50)
    settings = SweepSettings(seq_len=32, windows=2, device="cpu")
    found = sweep(tmp_path / "m", words, Grid(("e8m0", "fp32"), (32, 128)), settings, cache=tmp_path / "c")
    broken, too_long, fine, also = found.cells
    assert broken.perplexity is None
    assert "not finite" in str(broken.problem)
    assert fine.perplexity is not None
    assert too_long.problem == also.problem == "block 128 is longer than the longest row of the model's weights, 64"
    assert any("e8m0/32/even" in line and "not finite" in line for line in sentences(found))
    assert sentences(found)[-1].endswith("scale rules of the weights: even for e8m0, absmax for fp32.")
    plot_sweep(found, tmp_path / "broken.png")
    json.dumps(found.to_dict(), allow_nan=False)
    assert list(csv.DictReader(io.StringIO(to_csv(found))))[1]["perplexity"] == ""


def _byte_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(97 + i): i for i in range(26)} | {"?": 26}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_weights_beyond_the_largest_scale_get_a_note(text, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(mxquant.bundled.path())
    rescale(model, factor=2.0**14)
    model.save_pretrained(tmp_path / "wide")
    hf.AutoTokenizer.from_pretrained(mxquant.bundled.path()).save_pretrained(tmp_path / "wide")
    found = sweep(tmp_path / "wide", text, Grid(("e4m3", "ue5m3"), (16, 256)), QUICK, cache=tmp_path / "c")
    assert any(note.startswith("e4m3 scales reach weights of 2688, these go up to") for note in found.notes)
    assert not any(note.startswith("ue5m3") for note in found.notes)
    assert "a block of 256 is longer than the rows of 30 of 35 matrices" in found.notes


_SIZES = {
    **{"vocab_size": 27, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_HYBRIDS = {
    "granite, Mamba and experts": lambda: hf.GraniteMoeHybridConfig(
        **{**_SIZES, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        layer_types=["mamba", "attention"],
    ),
    "bamba": lambda: hf.BambaConfig(**_SIZES, **_MAMBA, attn_layer_indices=[1]),
    "qwen, experts": lambda: hf.Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "jamba": lambda: hf.JambaConfig(
        **{**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
}


@pytest.mark.parametrize("kind", _HYBRIDS)
def test_mixtures_and_hybrids_are_quantized_whole(kind):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(_HYBRIDS[kind]()).eval()
    linears = linear_weights(model)
    dense = RememberingVariant(kind, kind, model, _byte_tokenizer(), linears=linears, budget=1 << 20)
    bench = Bench(dense, torch.arange(64).view(2, 32) * 5 % 27, batch_size=2)
    found = measure(bench, CellSpec(QuantScheme.parse("ue5m3/16/absmax"), "same"))
    assert 0 < found.kl < 0.1
    assert found.relative_error == pytest.approx(0.095, abs=0.005), "that of Gaussian weights"
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name}
    left = {name for name in matrices if name not in {linear.name for linear in linears}}
    assert all(re.search(r"lm_head|conv1d|dt_proj|A_log|router|gate\.weight", name) for name in left), left
    assert not [note for note in found.notes if "never called" in note]


def test_a_layer_that_is_never_called_is_said(narrow):
    """Its weight is quantized, but its inputs are not."""
    model = load_model(narrow, device="cpu", dtype="float32")
    layer = model.model.model.layers[0].mlp
    layer.forward = lambda x: layer.down_proj(layer.act_fn(layer.gate_proj(x)) * (x @ layer.up_proj.weight.T))
    linears = linear_weights(model.model)
    dense = RememberingVariant("m", "m", model.model, model.tokenizer, linears=linears, budget=1 << 20)
    bench = Bench(dense, torch.arange(64).view(2, 32))
    notes = measure(bench, CellSpec(QuantScheme.parse("ue5m3/16/absmax"), "same")).notes
    assert [note for note in notes if "never called" in note] == [
        f"1 of {len(linears)} layers were never called, so that their inputs were not quantized, "
        "e.g. model.layers.0.mlp.up_proj.weight"
    ]


def test_what_cannot_be_swept_is_an_error_before_any_cell(narrow, text, tmp_path):
    grid = Grid(("ue5m3",), (16,))
    mxquant.quantize_model(narrow, tmp_path / "q", "mxfp4")
    with pytest.raises(MXQuantError, match="already quantized"):
        sweep(tmp_path / "q", text, grid, QUICK, cache=tmp_path / "c")
    with pytest.raises(MXQuantError, match="fewer than one window"):
        sweep(narrow, EvalText("short", "Too short."), grid, QUICK, cache=tmp_path / "c")
    with pytest.raises(MXQuantError, match="no cells"):
        sweep(narrow, text, Grid(("e8m0",), (16,), ("absmax",)), QUICK, cache=tmp_path / "c")
    (tmp_path / "file").touch()
    with pytest.raises(MXQuantError, match="cannot keep cells in"):
        sweep(narrow, text, grid, QUICK, cache=tmp_path / "file")
    model = hf.AutoModelForCausalLM.from_pretrained(narrow)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    hf.AutoTokenizer.from_pretrained(narrow).save_pretrained(tmp_path / "nan")
    with pytest.raises(MXQuantError, match=r"nan: its logits are not finite in window 0"):
        sweep(tmp_path / "nan", text, grid, QUICK, cache=tmp_path / "c")


def test_inversions_are_paired_over_windows_and_runs_are_joined():
    hard = (5.0, 1.0, 3.0, 2.0)  # windows differ far more than cells do

    def shifted(text: str, by: float, **figures: float) -> Cell:
        return cell(text, *(x + by + 0.001 * i for i, x in enumerate(hard)), **figures)

    e4m3 = [
        shifted("e4m3/64/absmax", 0.05),
        shifted("e4m3/8/absmax", 0.5, zero_scales=0.2, subnormal_scales=0.111),
        shifted("e4m3/16/absmax", 0.3),
        shifted("e4m3/32/absmax", 0.0),
    ]
    better = [shifted("ue5m3/8/absmax", 0.1), shifted("ue5m3/16/absmax", 0.2)]
    noise = [cell("bf16/8", 5, 1.2, 3, 2.1), cell("bf16/16", 5.1, 1, 3.1, 2)]
    (found,) = find_inversions([*e4m3, *better, *noise])
    assert [c.spec.block_size for c in found.cells] == [32, 16, 8]
    at = {c.spec.block_size: number(c.perplexity) for c in e4m3}
    assert found.text == (
        f"e4m3: perplexity rises from {at[32]} at 32 to {at[16]} at 16 and {at[8]} at 8; "
        "31 % of blocks of 8 have a zero or subnormal scale (20 % zero)"
    )
    assert [line.name for line in lines_of([*e4m3, *better, *noise])] == ["e4m3", "ue5m3", "bf16"]


def test_one_window_decides_by_sign_and_a_lost_cell_is_no_inversion():
    lost = Cell(CellSpec(QuantScheme.parse("e4m3/4/absmax")), None, "not finite", [])
    cells = [lost, cell("e4m3/8/absmax", 3.01), cell("e4m3/16/absmax", 3.0)]
    assert [[c.spec.block_size for c in i.cells] for i in find_inversions(cells)] == [[16, 8]]


def test_lines_are_told_apart_by_what_differs():
    cells = [cell(t, 1.0) for t in ("e4m3/8/absmax", "e4m3/8/search", "bf16/8", "e4m3/8x8/search", "fp6_e2m3/bf16/8")]
    names = [line.name for line in lines_of(cells)]
    assert names == [
        *("fp4_e2m1 e4m3 absmax", "fp4_e2m1 e4m3 search", "fp4_e2m1 bf16"),
        *("fp4_e2m1 e4m3 search tiles", "fp6_e2m3 bf16"),
    ]


@pytest.mark.parametrize(("low", "high"), [(26.4, 57), (0.013, 0.8), (4.5, 9), (1, 1e5), (14.1, 22.6)])
def test_ticks_of_a_logarithmic_axis_are_few_round_numbers(low, high):
    ticks = round_ticks(low, high)
    assert 4 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)
    assert all(len(f"{tick:.10g}".replace(".", "").strip("0")) <= 2 for tick in ticks)


def test_tables_csv_json_and_pictures_hold_every_cell(inverted, tmp_path):
    from rich.console import Console

    out = Console(width=132, record=True, file=io.StringIO())
    for table in tables(inverted):
        out.print(table)
    printed = out.export_text()
    for c in inverted.cells:
        assert number(c.perplexity) in printed
    assert number(inverted.cells[0].perplexity) + "^" in printed
    rows = list(csv.DictReader(io.StringIO(to_csv(inverted))))
    assert [rows[0]["element"], len(rows)] == ["dense", 17]
    assert [float(row["perplexity"]) for row in rows[1:]] == [c.perplexity for c in inverted.cells]
    assert (rows[1]["scale"], rows[1]["block"], rows[1]["rule"], rows[1]["inputs"]) == ("e4m3", "8", "absmax", "none")
    data = json.loads(json.dumps(inverted.to_dict(), allow_nan=False))
    assert [Cell.from_dict(c) for c in data["cells"]] == inverted.cells
    assert data["settings"]["windows"] == 6
    for kind in ("png", "svg"):
        plot_sweep(inverted, tmp_path / f"s.{kind}", "caption")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert "e4m3+global" in _svg_words(tmp_path / "s.svg")


def _svg_words(path) -> str:
    """matplotlib draws text as paths and keeps the words as comments."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_the_preset_is_the_papers_protocol():
    preset = PRESETS["is-finer-better"]
    cells, notes = preset.grid.cells()
    assert not notes
    assert (preset.text, preset.seq_len, preset.windows) == ("wikitext2", 2048, None)
    assert {c.weights.element for c in cells} == {"fp4_e2m1"}
    assert {c.weights.scale_rule for c in cells} == {"absmax"}
    assert {c.inputs for c in cells} == {"none", "same"}
    assert {c.block_size for c in cells} == {2**i for i in range(1, 9)}


@pytest.mark.slow
def test_two_processes_measure_what_one_does(narrow, text, tmp_path):
    grid = Grid(("ue5m3",), (8, 16, 32))
    one = sweep(narrow, text, grid, QUICK, cache=tmp_path / "one")
    seen: list[Done] = []
    two = sweep(narrow, text, grid, QUICK, cache=tmp_path / "two", devices=["cpu", "cpu"], on_done=seen.append)
    assert [c.perplexity for c in two.cells] == pytest.approx([c.perplexity for c in one.cells], rel=1e-5)
    assert sorted(done.number for done in seen) == [0, 1, 2, 3]
    assert two.settings == one.settings


def test_what_fails_in_a_process_is_one_line_and_names_the_device(narrow, tmp_path):
    messages = queue.Queue()
    run_share(Job(str(narrow), EvalText("short", "Too short."), [], QUICK, tmp_path), messages)
    kind, line = messages.get_nowait()
    assert kind == "error"
    assert re.fullmatch(r"cpu: short has \d+ tokens, fewer than one window of 128; .*", line)
    with pytest.raises(MXQuantError, match="--jobs 99 needs 99 CUDA devices"):
        cuda_devices(99)


def test_tasks_are_measured_on_the_quantized_model(narrow, text, tmp_path):
    (tmp_path / "items.jsonl").write_text("\n".join(json.dumps({"q": "Return a", "a": i % 2}) for i in range(4)))
    (tmp_path / "my_items.yaml").write_text(
        "task: my_items\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'items.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: a\n"
        "doc_to_choice: [' list', ' xylophone']\nmetric_list: [{metric: acc}]\n"
    )
    settings = SweepSettings(
        seq_len=64, windows=1, device="cpu", tasks="my_items", include_path=str(tmp_path), num_fewshot=0
    )
    found = sweep(narrow, text, Grid(("ue5m3",), (16,)), settings, cache=tmp_path / "cells")
    assert found.dense.tasks["my_items"]["acc"]["value"] == 0.5
    assert found.cells[0].tasks["my_items"]["acc"]["value"] == 0.5
    assert "my_items acc" in to_csv(found).splitlines()[0]
    assert any("my_items, acc" in table.title for table in tables(found))
