"""Perplexity is what a model's own loss says, whatever the chunks, batches and architecture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config

from mxquant.errors import MXQuantError
from mxquant.evals import perplexity
from mxquant.evals.models import EvalModel, load_model
from mxquant.evals.perplexity import evaluate
from mxquant.evals.text import load_text
from mxquant.evals.windows import bos_token, cut_windows, window_length

VOCABULARY = 40
BOS = 0
TEXT = " ".join(str(i * i % 37 + 1) for i in range(100))

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**_SMALL),
    "qwen2": Qwen2Config(**{k: v for k, v in _SMALL.items() if k != "head_dim"}),
    # Its logits are squashed after the head: pieces of logits must be, too.
    "gemma3": Gemma3TextConfig(**_SMALL, final_logit_softcapping=2.0, sliding_window=8),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


def make_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """One token a word: "1" is token 1, "2" is token 2, ..."""
    words = {"<s>": BOS, **{str(i): i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def make_model(kind: str = "llama", *, seed: int = 0, bos: bool = True) -> EvalModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # a fresh model predicts next to nothing
    return EvalModel(name=f"{kind}-{seed}", source="", model=model, tokenizer=make_tokenizer(bos))


def own_loss(model: EvalModel, windows: torch.Tensor) -> float:
    """Perplexity from the loss that the model computes itself, a window at a time."""
    with torch.no_grad():
        losses = [model.model(w[None], labels=w[None]).loss.double() for w in windows]
    return math.exp(torch.stack(losses).mean().item())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("bos", [True, False])
def test_equals_exp_of_the_models_own_mean_loss(kind, bos):
    model = make_model(kind, bos=bos)
    (result,) = evaluate([model], TEXT, seq_len=16)
    windows = cut_windows(model.tokenizer, TEXT, 16)
    assert result.perplexity == pytest.approx(own_loss(model, windows), rel=1e-5)
    assert (result.windows, result.tokens, result.bos) == (6, 6 * 15, bos)


@pytest.mark.parametrize("kind", CONFIGS)
def test_pieces_of_logits_are_the_logits(kind):
    model = make_model(kind)
    tokens = torch.randint(VOCABULARY, (2, 16))
    with torch.no_grad(), model.logits(tokens) as piece:
        pieces = torch.cat([piece(0, 5), piece(5, 6), piece(6, 16)], dim=1)
        torch.testing.assert_close(pieces, model.model(tokens).logits)
    with torch.no_grad():  # and the model is as it was
        torch.testing.assert_close(model.model(tokens[:, :4]).logits, pieces[:, :4])


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_body_runs_once_a_window_and_the_head_for_few_positions_at_a_time(kind, monkeypatch):
    model = make_model(kind)
    calls, widths = [], []
    model.model.base_model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    model.model.get_output_embeddings().register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    monkeypatch.setattr(perplexity, "_CHUNK_LOGITS", 4 * VOCABULARY)
    evaluate([model], TEXT, seq_len=16)
    assert len(calls) == 6
    assert max(widths) == 4
    assert sum(widths) == 6 * 15


def test_chunks_and_batches_change_nothing(monkeypatch):
    model = make_model()
    (whole,) = evaluate([model], TEXT, seq_len=16)
    for batch_size, chunk in ((4, 1 << 24), (1, 1), (5, 7 * VOCABULARY)):
        monkeypatch.setattr(perplexity, "_CHUNK_LOGITS", chunk)
        (other,) = evaluate([model], TEXT, seq_len=16, batch_size=batch_size)
        torch.testing.assert_close(other.window_nll, whole.window_nll, rtol=1e-5, atol=0)


def test_a_model_without_preference_has_the_vocabulary_as_perplexity():
    model = make_model("llama")
    torch.nn.init.zeros_(model.model.lm_head.weight)
    (result,) = evaluate([model], TEXT, seq_len=16)
    assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_windows_do_not_overlap_and_the_rest_is_dropped():
    windows = cut_windows(make_tokenizer(bos=False), TEXT, 16)
    assert windows.shape == (6, 16)
    assert windows.flatten().tolist() == [int(word) for word in TEXT.split()][:96]
    assert cut_windows(make_tokenizer(bos=False), TEXT, 16, limit=2).equal(windows[:2])
    assert cut_windows(make_tokenizer(bos=False), TEXT, 16, limit=99).equal(windows)


def test_bos_takes_the_place_of_each_windows_last_token():
    tokenizer = make_tokenizer(bos=True)
    windows, plain = cut_windows(tokenizer, TEXT, 16), cut_windows(make_tokenizer(bos=False), TEXT, 16)
    assert windows[:, 0].eq(BOS).all()
    assert windows[:, 1:].equal(plain[:, :-1])
    assert (bos_token(tokenizer), bos_token(make_tokenizer(bos=False))) == (BOS, None)


def test_window_length_defaults_to_the_smallest_limit():
    assert window_length(None, {"a": 8192, "b": None}) == 2048
    assert window_length(None, {"a": 8192, "b": 512}) == 512
    assert window_length(256, {"a": 512}) == 256
    with pytest.raises(MXQuantError, match="--seq-len 513 is more than the 512 positions of a"):
        window_length(513, {"a": 512})


def test_progress_counts_the_windows_of_all_models():
    seen = []
    evaluate([make_model(), make_model(seed=1)], TEXT, seq_len=16, progress=lambda *x: seen.append(x))
    assert seen[0] == (1, 12)
    assert seen[-1] == (12, 12)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1 2 3", {"seq_len": 16}, "3 tokens, fewer than one window of 16"),
        (TEXT, {"seq_len": 1}, "--seq-len 2 or more"),
        (TEXT, {"windows": 0}, "--windows 1 or more"),
        (TEXT, {"batch_size": 0}, "batch"),
        (TEXT, {"seq_len": 65}, "64 positions"),
    ],
)
def test_nonsense_is_refused(text, options, message):
    with pytest.raises(MXQuantError, match=message):
        evaluate([make_model()], text, **options)


def test_logits_that_are_not_finite_give_no_perplexity():
    model = make_model()
    broken = make_model(seed=1)
    broken.model.model.norm.weight.data[3] = math.nan
    good, bad = evaluate([model, broken], TEXT, seq_len=16)
    assert good.perplexity is not None
    assert bad.perplexity is None
    assert "not finite in window 0" in bad.problem
    assert bad.to_dict()["perplexity"] is None
    compared = evaluate([broken, model], TEXT, seq_len=16, baseline=model)
    assert compared[1].divergence is None
    assert compared[2].divergence.kl == 0
    with pytest.raises(MXQuantError, match="baseline llama-1: its logits are not finite"):
        evaluate([model], TEXT, seq_len=16, baseline=broken)


def test_texts_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, message in (("none.txt", "no text file"), ("empty.txt", "is empty"), ("latin.txt", "not UTF-8")):
        with pytest.raises(MXQuantError, match=message):
            load_text(tmp_path / name)
    with pytest.raises(MXQuantError, match="cannot read"):
        load_text(tmp_path)


def test_wikitext2_without_a_network_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(MXQuantError, match="use --text FILE"):
        load_text("wikitext2")


def test_figures_of_a_trained_model():
    shared = Path(__file__).resolve().parents[3] / "shared"
    model, text = shared / "models" / "stories260k", shared / "data" / "wikitext2_test.txt"
    if not (model.is_dir() and text.is_file()):
        pytest.skip("needs a trained model and WikiText-2, which are not part of the repository")
    (result,) = evaluate([load_model(model, device="cpu")], load_text(text), windows=6)
    assert result.perplexity == pytest.approx(130.7, abs=0.1)
    assert result.tokens == 6 * 511
