"""``mxquant train``: what it writes and prints, how it goes on, and bad input."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.cli.main import main
from mxquant.evals.training.summary import Estimate
from mxquant.evals.training.text import load_training_text, training_windows

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SHORT = ("--steps", "3", "--batch-size", "1", "--seq-len", "32", "--eval-windows", "4", "--dtype", "float32")


def run(*arguments: object):
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny config and a short text: (config, text)."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "config.json").write_text(json.dumps(TINY))
    lines = [f"The number {i} is {'even' if i % 2 == 0 else 'odd'}, and {i + 1} follows it.\n" for i in range(400)]
    (folder / "text.txt").write_text("".join(lines))
    return folder / "config.json", folder / "text.txt"


@pytest.fixture(scope="module")
def study(files, tmp_path_factory):
    """A finished study of two recipes and two seeds: (folder, output of the command)."""
    out = tmp_path_factory.mktemp("out") / "study"
    config, text = files
    result = run(
        *("--config", config, "--text", text, *SHORT, "--seeds", "0,1", "--output", out),
        *("--recipe", "bf16", "--recipe", "fp4-2d", "--recipe", "mxfp4-1d", "--monitor-every", 2),
    )
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_what_is_left_behind(study):
    out, printed = study
    runs = {f"{recipe}-seed{seed}" for recipe in ("bf16", "fp4-2d", "mxfp4-1d") for seed in (0, 1)}
    assert {path.name for path in out.iterdir()} == runs | {"study.json", "curves.png"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"fp4-2d +\d\.\d{4} ± \d\.\d{4} ", printed)
    for name in runs:
        AutoModelForCausalLM.from_pretrained(out / name)
        assert (out / name / "tokenizer.json").exists()


def test_the_json_says_what_was_measured(study):
    out, _ = study
    found = json.loads((out / "study.json").read_text(), parse_constant=pytest.fail)
    assert found["baseline"] == "bf16"
    by_name = {(run["recipe"], run["seed"]): run for run in found["runs"]}
    rows = {row["recipe"]: row for row in found["rows"]}
    gaps = [100 * (by_name["fp4-2d", s]["loss"] / by_name["bf16", s]["loss"] - 1) for s in (0, 1)]
    assert rows["fp4-2d"]["gap"]["mean"] == pytest.approx(sum(gaps) / 2)
    assert rows["bf16"]["gap"] is None
    assert rows["fp4-2d"]["eval_perplexity"] == pytest.approx(math.exp(rows["fp4-2d"]["eval_loss"]["mean"]))
    assert rows["mxfp4-1d"]["monitored"]["mismatch"] > 0.01 > rows["fp4-2d"]["monitored"]["mismatch"] == 0
    assert rows["mxfp4-1d"]["monitored"]["saturated"] > 0.1 > rows["fp4-2d"]["monitored"]["saturated"] == 0
    # The same start and the same data: the first losses are those of the same weights.
    for seed in (0, 1):
        first = [by_name[recipe, seed]["curve"][0]["loss"] for recipe in ("bf16", "fp4-2d", "mxfp4-1d")]
        assert first == pytest.approx([first[0]] * 3, rel=5e-3)
    assert by_name["bf16", 0]["curve"][0]["loss"] != by_name["bf16", 1]["curve"][0]["loss"]


def test_resuming_a_finished_study_reads_it(study, files):
    out, printed = study
    config, text = files
    arguments = (
        *("--config", config, "--text", text, *SHORT, "--seeds", "0,1", "--output", out),
        *("--recipe", "bf16", "--recipe", "fp4-2d", "--recipe", "mxfp4-1d", "--monitor-every", 2),
    )
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "holds a run already; pass --resume" in refused.stderr
    again = run(*arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout == printed


def test_the_held_out_loss_is_what_eval_measures(study):
    from mxquant.evals.models import load_model
    from mxquant.evals.perplexity import evaluate
    from mxquant.evals.text import EvalText

    out, _ = study
    found = json.loads((out / "study.json").read_text())
    text = load_training_text(found["text"]["name"]).heldout
    model = load_model(out / "bf16-seed0", dtype="float32", device="cpu")
    (measured,) = evaluate([model], EvalText("held out", text.text), seq_len=32, windows=4)
    run_ = next(run for run in found["runs"] if (run["recipe"], run["seed"]) == ("bf16", 0))
    assert math.log(measured.perplexity) == pytest.approx(run_["eval_loss"], rel=1e-5)


def test_trained_from_a_checkpoint_and_handed_over_to_quantize(study, files, tmp_path):
    out, _ = study
    result = run(
        *("--from", out / "bf16-seed0", "--text", files[1], *SHORT, "--output", tmp_path / "tuned"),
        *(
            "--recipe",
            "ue5m3-2d",
            "--block",
            "16",
            "--rounding",
            "gradient=nearest",
            "--exclude",
            "down_proj",
            "--json",
        ),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recipes"][0]["default"]["gradient"] == "ue5m3+global/16x16/ceil"
    trained = tmp_path / "tuned" / "ue5m3-2d"
    recipe = trained / "quantize.yaml"
    done = CliRunner().invoke(main, ["quantize", str(trained), "--recipe", str(recipe), "--out", str(tmp_path / "q")])
    assert done.exit_code == 0, done.output
    packed = mxquant.load(tmp_path / "q")
    schemes = {m.scheme.text for m in packed.modules() if isinstance(m, mxquant.QuantLinear)}
    assert schemes == {"ue5m3/16x16/ceil"}
    assert type(packed.model.layers[0].mlp.down_proj) is torch.nn.Linear
    refused = run("--from", tmp_path / "q", "--output", tmp_path / "no")
    assert refused.exit_code == 1
    assert "already quantized (mxquant)" in refused.stderr


def test_a_run_that_diverges_does_not_keep_the_next_from_its_turn(files, tmp_path):
    config, text = files
    options = ("--config", config, "--text", text, *SHORT, "--steps", 40, "--warmup", 0, "--lr", 100)
    result = run(*options, "--recipe", "fp4-2d", "--recipe", "bf16", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "fp4-2d diverged at seed 0: step" in result.stdout
    assert "bf16 diverged at seed 0: step" in result.stdout
    found = json.loads((tmp_path / "study.json").read_text(), parse_constant=pytest.fail)
    assert [run["loss"] for run in found["runs"]] == [None, None]
    assert (tmp_path / "curves.png").exists()


def test_dry_run_prints_the_papers_figures(tmp_path):
    olmo = {"model_type": "olmo", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192}
    olmo |= {"num_hidden_layers": 16, "num_attention_heads": 16, "tie_word_embeddings": True}
    (tmp_path / "olmo.json").write_text(json.dumps(olmo))
    result = run("--config", tmp_path / "olmo.json", "--recipe", "fp4-2d-qk8", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Weights 2,353.5 MB -> 810.0 MB (65.6% less)" in result.stdout
    assert "speed-up of linear layers 3.56x" in result.stdout
    assert "Assumed:" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "fp4-3d"], "unknown training recipe 'fp4-3d'"),
        (["--recipe", "fp4-2d", "--exclude", "nothing_like_it"], "pattern 'nothing_like_it' matches no linear layer"),
        (["--recipe", "fp4-2d", "--recipe", "fp4-2d"], "a recipe is given twice"),
        (["--seeds", "1,x"], "must be numbers such as 0,1,2"),
        (["--rounding", "gradient=up"], "must look like gradient=nearest"),
        (["--rounding", "grad=nearest"], "unknown role 'grad'"),
        (["--lr", "-1"], "the learning rate must be positive"),
        (["--text", "nowhere.txt"], "no text file nowhere.txt"),
        (["--text", "EMPTY"], "EMPTY is empty"),
        (["--config", "nowhere.json"], "cannot read config nowhere.json"),
        (["--config", "SMALL"], "the tokenizer has 2048 tokens"),
        (["--from", "nowhere"], "no such folder or hub id: nowhere"),
        (["--from", "x", "--config", "y"], "--from cannot be combined with --config"),
        (["--seq-len", "4096"], "--seq-len 4096 is more than the 64 positions"),
        (["--limit", "3"], "--limit requires --tasks"),
    ],
)
def test_bad_input_is_one_clear_line_before_any_work(files, tmp_path, arguments, message):
    small, empty = tmp_path / "small.json", tmp_path / "EMPTY"
    small.write_text(json.dumps(TINY | {"vocab_size": 100}))
    empty.write_text(" \n")
    given = [str({"SMALL": small, "EMPTY": empty}.get(a, a)) for a in arguments]
    usual = [] if {"--config", "--from"} & set(arguments) else ["--config", str(files[0])]
    result = run(*usual, *given, "--output", tmp_path / "out")
    assert result.exit_code in (1, 2)
    assert message in result.stderr.replace(str(empty), "EMPTY")
    assert not list((tmp_path / "out").glob("*"))


def test_a_file_is_held_out_at_its_end(files):
    text = load_training_text(str(files[1]))
    whole = files[1].read_text()
    assert text.documents[0] + text.heldout.text == whole
    assert 0.04 < len(text.heldout.text) / len(whole) < 0.06
    assert load_training_text(str(files[1]), eval_text="builtin").documents == (whole,)


def test_a_data_set_in_a_folder(tmp_path):
    rows = [json.dumps({"text": f"document {i}", "other": i}) for i in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    text = load_training_text(str(tmp_path), characters=200)
    assert text.heldout.text == "document 0"
    assert text.documents[0] == "document 1"
    assert len(text.documents) < 25
    with pytest.raises(mxquant.MXQuantError, match=r"no column 'body' but text, other"):
        load_training_text(str(tmp_path), column="body")


def test_windows_hold_whole_documents_between_their_special_tokens():
    from mxquant.evals.training.initial_model import from_config

    tokenizer = from_config(None, None).tokenizer
    text = load_training_text("builtin")
    first = tokenizer(text.documents[0])["input_ids"]
    windows = training_windows(text, tokenizer, 64)
    assert windows.flatten()[: len(first) + 2].tolist() == [*first, tokenizer.eos_token_id, tokenizer.bos_token_id]


def test_intervals_are_students():
    assert Estimate.of([]) is None
    assert Estimate.of([2.0]) == Estimate(2.0, None)
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
