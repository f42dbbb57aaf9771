"""Several texts, and evaluations that grow: what is known is not measured again, and nothing stale is used."""

from __future__ import annotations

import errno
import json
import math
import shutil

import pytest
from click.testing import CliRunner

import mxquant
import mxquant.bundled
from mxquant.cli.main import main
from mxquant.evals import run as run_module
from mxquant.evals.cache import model_hash
from mxquant.evals.find_model import find_model
from mxquant.evals.models import load_model
from mxquant.evals.result_store import Memory

BUNDLED = str(mxquant.bundled.path())
QUICK = ("--seq-len", "64", "--device", "cpu")
TEXT = "Return the number of items in the list, or raise an error if there is none.\n"


def invoke(*args: object):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for name, scheme in (("a", "ue5m3/16"), ("b", "mxfp4")):
        mxquant.quantize_model(BUNDLED, folder / name, scheme)
    (folder / "one.txt").write_text(TEXT * 30)
    (folder / "two.txt").write_text(TEXT.upper() * 15)
    return folder


@pytest.fixture
def loaded(monkeypatch):
    """The names of the models that are loaded."""
    names = []

    def load(source, **options):
        names.append(source.name)
        return load_model(source, **options)

    monkeypatch.setattr(run_module, "load_model", load)
    return names


def test_two_texts_are_two_rows_with_the_figures_of_each_alone(folder):
    one, two = folder / "one.txt", folder / "two.txt"
    both = invoke("eval", folder / "a", "--baseline", BUNDLED, *QUICK, "--text", one, "--text", two, "--json")
    assert both.exit_code == 0, both.stderr
    found = json.loads(both.stdout)
    assert [text["name"] for text in found["texts"]] == [str(one), str(two)]
    assert found["text"] == found["texts"][0]
    for text in (one, two):
        alone = json.loads(invoke("eval", folder / "a", "--baseline", BUNDLED, *QUICK, "--text", text, "--json").stdout)
        for with_other, by_itself in zip(found["models"], alone["models"], strict=True):
            got, expected = with_other["perplexities"][str(text)], by_itself["perplexity"]
            for key in ("perplexity", "windows", "divergence"):
                assert got[key] == expected[key]
    for row in found["models"]:
        assert row["perplexity"] == row["perplexities"][str(one)]
        assert row["perplexities"][str(one)]["perplexity"] != row["perplexities"][str(two)]["perplexity"]


def test_a_model_given_twice_has_two_rows(folder):
    result = invoke("eval", folder / "a", folder / "a", *QUICK, "--text", folder / "one.txt", "--json")
    assert result.exit_code == 0, result.stderr
    one, two = json.loads(result.stdout)["models"]
    assert one["perplexity"]["perplexity"] == two["perplexity"]["perplexity"]


def test_a_row_for_each_model_and_text_in_the_table_and_the_picture(folder, tmp_path):
    texts = ("--text", folder / "one.txt", "--text", folder / "two.txt", "--windows", 2)
    result = invoke("eval", folder / "a", *QUICK, *texts, "--plot", tmp_path / "p.svg")
    lines = [line.split()[:2] for line in result.stdout.splitlines()]
    assert [line for line in lines if line[:1] == ["a"] and line[1].endswith(".txt")] == [
        ["a", "one.txt"],
        ["a", "two.txt"],
    ]
    picture = (tmp_path / "p.svg").read_text()
    assert "one.txt" in picture
    assert "two.txt" in picture


@pytest.mark.parametrize(("other", "message"), [("one.txt", "is given twice"), ("same.txt", "is the same as")])
def test_a_text_given_twice_is_refused(other, message, folder):
    shutil.copyfile(folder / "one.txt", folder / "same.txt")
    result = invoke("eval", folder / "a", *QUICK, "--text", folder / "one.txt", "--text", folder / other)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_later_text_that_is_too_short_is_known_before_the_first_is_measured(folder):
    (folder / "short.txt").write_text("Too short.")
    result = invoke("eval", folder / "a", *QUICK, "--text", folder / "one.txt", "--text", folder / "short.txt")
    assert result.exit_code == 1
    assert "fewer than one window of 64" in result.stderr
    assert result.stdout == ""


def test_a_comparison_grows_and_what_is_known_is_marked(folder, loaded, tmp_path):
    common = ("--baseline", BUNDLED, *QUICK, "--text", folder / "one.txt", "--cache", tmp_path / "c", "--json")
    first = json.loads(invoke("eval", folder / "a", *common).stdout)
    assert loaded == ["model", "a"]
    assert not any(row["perplexity"]["cached"] for row in first["models"])
    loaded.clear()
    second = invoke("eval", folder / "a", *common)
    assert loaded == []
    again = json.loads(second.stdout)
    assert all(row["perplexity"].pop("cached") for row in again["models"])
    for row, before in zip(again["models"], first["models"], strict=True):
        before["perplexity"].pop("cached")
        assert {**row, "perplexities": None} == {**before, "perplexities": None}
    grown = json.loads(invoke("eval", folder / "a", folder / "b", *common).stdout)
    assert loaded == ["model", "b"]  # the baseline's logits are kept nowhere
    assert [row["perplexity"]["cached"] for row in grown["models"]] == [False, True, False]
    table = invoke("eval", folder / "a", folder / "b", *common[:-1]).stdout
    assert "†" in table
    assert "† was measured before and kept in the cache." in table


def test_nothing_else_than_the_same_is_taken_from_the_cache(folder, loaded, tmp_path):
    cache, model, text = tmp_path / "c", tmp_path / "m", tmp_path / "t.txt"
    shutil.copytree(folder / "a", model)
    text.write_text(TEXT * 20)

    def measured(*options: object, quick=QUICK) -> bool:
        """Whether the model was loaded, and its perplexity is that of a run without a cache."""
        loaded.clear()
        arguments = ("eval", model, "--text", text, *quick, *options, "--json")
        found = json.loads(invoke(*arguments, "--cache", cache).stdout)
        was_loaded = bool(loaded)
        fresh = json.loads(invoke(*arguments).stdout)
        assert found["models"][0]["perplexity"]["perplexity"] == fresh["models"][0]["perplexity"]["perplexity"]
        return was_loaded

    assert measured()
    assert not measured()
    text.rename(tmp_path / "renamed.txt")
    text = tmp_path / "renamed.txt"
    assert not measured()
    text.write_text(TEXT * 20 + TEXT.upper() * 20)
    assert measured()
    assert measured("--windows", 2)
    assert measured(quick=("--seq-len", "32", "--device", "cpu"))
    assert measured("--dtype", "float32")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert measured()
    for file in cache.iterdir():
        file.write_text(file.read_text()[:-20])
    assert measured()


def test_a_models_hash_is_that_of_its_files(folder, tmp_path):
    model = tmp_path / "copy"
    shutil.copytree(folder / "a", model)
    before = model_hash(find_model(model))
    assert before == model_hash(find_model(folder / "a"))
    (model / "README.md").write_text("Another card.")
    (model / ".hidden").write_text("x")
    assert model_hash(find_model(model)) == before
    (model / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text() + " ")
    assert model_hash(find_model(model)) != before


def test_a_disk_that_is_full_costs_nothing_that_was_found(folder, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    common = ("--text", folder / "one.txt", "--text", folder / "two.txt", *QUICK)
    with monkeypatch.context() as patched:
        keep = Memory.keep_perplexity

        def keep_one(self, source, text, *rest):
            if text.name.endswith("two.txt"):
                patched.setattr("mxquant.evals.cache.write", full)
            keep(self, source, text, *rest)

        patched.setattr(Memory, "keep_perplexity", keep_one)
        result = invoke("eval", folder / "a", *common, "--cache", tmp_path / "c", "--json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"Error: cannot keep results in {tmp_path / 'c'}: No space left on device"
    assert list(json.loads(result.stdout)["models"][0]["perplexities"]) == [
        str(folder / n) for n in ("one.txt", "two.txt")
    ]


def test_a_cache_that_cannot_be_written_is_one_line_before_the_work(folder, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("eval", folder / "a", "--text", folder / "one.txt", *QUICK, "--cache", tmp_path / "file" / "c")
    assert result.exit_code == 1
    assert "cannot keep results in" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("kind", ["mixtral-even", "llama4", "llama"])
def test_bits_per_weight_count_experts_too(kind, make_checkpoint, tmp_path):
    """As the report of quantizing has them, which knows the stored bytes of every tensor."""
    report = mxquant.quantize_model(make_checkpoint(kind), tmp_path / "q", "ue5m3/16")
    from mxquant.evals.models import describe_weights

    scheme, bits = describe_weights(mxquant.load(tmp_path / "q"), "mxquant")
    quantized = [t for t in report.plan.tensors if t.scheme is not None]
    stored = sum(t.bytes_after for t in quantized)
    weights = sum(math.prod(t.shape) for t in quantized)
    assert (scheme, bits) == ("fp4-ue5m3-b16", pytest.approx(8 * stored / weights))


@pytest.mark.parametrize("command", ["eval", "generate", "sweep"])
def test_a_model_that_predicts_no_tokens_is_refused_by_name(command, tmp_path):
    import transformers as hf
    from broken_inputs import run, stderr_line

    config = hf.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_labels=1)
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
    more = {
        "eval": ["--text", "builtin"],
        "generate": ["hello"],
        "sweep": ["--text", "builtin", "--output", tmp_path / "out"],
    }[command]
    result = run(command, tmp_path / "reward", *more)
    assert result.exit_code == 1
    assert "LlamaForSequenceClassification, which predicts no tokens" in stderr_line(result)
