"""Divergence is that of the whole distributions, its intervals those of paired windows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import mxquant.bundled
from mxquant.errors import MXQuantError
from mxquant.evals import perplexity
from mxquant.evals.divergence import summarize, token_agreement, token_kl
from mxquant.evals.intervals import bootstrap_interval
from mxquant.evals.models import EvalModel
from mxquant.evals.perplexity import evaluate
from mxquant.evals.windows import cut_windows

TEXT = "Return the number of items in the list, or raise an error if there is none.\n" * 20
SEQ_LEN = 32


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(mxquant.bundled.path())


@pytest.fixture
def make_model(tokenizer):
    def make(seed: int, vocabulary: int = len(tokenizer)) -> EvalModel:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
        model = LlamaForCausalLM(config).eval()
        model.lm_head.weight.data.mul_(20)  # a fresh model predicts next to nothing
        return EvalModel(name=f"model-{seed}", source="", model=model, tokenizer=tokenizer)

    return make


def test_a_model_does_not_diverge_from_itself(make_model):
    model = make_model(0)
    baseline, same = evaluate([model], TEXT, seq_len=SEQ_LEN, baseline=model)
    assert baseline.divergence is None
    found = same.divergence
    assert (found.kl, found.agreement, found.ratio) == (0.0, 1.0, 1.0)
    assert (found.kl_interval, found.ratio_interval, found.agreement_interval) == ((0, 0), (1, 1), (1, 1))


@pytest.mark.parametrize("chunk", [1 << 24, 5 * 2048])
def test_equals_brute_force_over_whole_windows(make_model, tokenizer, monkeypatch, chunk):
    monkeypatch.setattr(perplexity, "_CHUNK_LOGITS", chunk)
    dense, other, third = make_model(0), make_model(1), make_model(2)
    baseline, first, second = evaluate([other, third], TEXT, seq_len=SEQ_LEN, baseline=dense, batch_size=3)
    windows = cut_windows(tokenizer, TEXT, SEQ_LEN)
    with torch.no_grad():
        p, q, r = (m.model(windows).logits[:, :-1].double().log_softmax(-1) for m in (dense, other, third))
    for result, logs in ((first, q), (second, r)):
        kl = F.kl_div(logs, p, log_target=True, reduction="none").sum(-1)
        assert result.divergence.kl == pytest.approx(kl.mean().item(), rel=1e-5)
        same = (p.argmax(-1) == logs.argmax(-1)).double()
        assert result.divergence.agreement == pytest.approx(same.mean().item())
        assert result.divergence.ratio == pytest.approx(result.perplexity / baseline.perplexity)
        # The intervals are those of windows, paired.
        targets = windows[:, 1:, None]
        nll = [-x.gather(-1, targets)[..., 0].mean(1) for x in (p, logs)]
        low, high = bootstrap_interval(nll[1] - nll[0])
        assert result.divergence.ratio_interval == pytest.approx((math.exp(low), math.exp(high)), rel=1e-5)
        assert result.divergence.kl_interval == pytest.approx(bootstrap_interval(kl.mean(1)), rel=1e-4)
        assert result.divergence.agreement_interval == pytest.approx(bootstrap_interval(same.mean(1)))


def test_the_baseline_runs_once_a_window_however_many_models(make_model, tokenizer):
    dense = make_model(0)
    calls = []
    dense.model.model.embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    results = evaluate([make_model(1), make_model(2)], TEXT, seq_len=SEQ_LEN, baseline=dense)
    assert len(calls) == results[0].windows


def test_comparing_changes_no_perplexity(make_model):
    alone = evaluate([make_model(0), make_model(1)], TEXT, seq_len=SEQ_LEN)
    beside = evaluate([make_model(1)], TEXT, seq_len=SEQ_LEN, baseline=make_model(0))
    assert [x.perplexity for x in alone] == [x.perplexity for x in beside]


def test_kl_has_a_direction_and_ignores_what_the_baseline_rules_out():
    p = torch.tensor([0.5, 0.5, 0.0]).log()
    q = torch.tensor([0.25, 0.5, 0.25]).log()
    assert token_kl(p, q).item() == pytest.approx(0.5 * math.log(2))
    assert token_kl(q, p).item() == math.inf
    assert token_kl(p, p).item() == 0
    assert token_agreement(torch.tensor([[0.1, 0.2], [0.2, 0.1]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])).tolist() == [
        True,
        False,
    ]


def test_a_window_that_is_hard_for_both_widens_no_interval():
    easy_and_hard = torch.tensor([1.0, 9.0, 1.0, 9.0, 1.0], dtype=torch.float64)
    found = summarize(easy_and_hard, easy_and_hard + 0.1, torch.ones(5), torch.ones(5))
    assert found.ratio == pytest.approx(math.exp(0.1))
    assert found.ratio_interval == pytest.approx((math.exp(0.1), math.exp(0.1)))


def test_models_with_other_vocabularies_are_not_compared(make_model, tokenizer):
    with pytest.raises(MXQuantError, match="vocabulary of 4096 tokens and the baseline model-0 one of 2048"):
        evaluate([make_model(1, vocabulary=4096)], TEXT, seq_len=SEQ_LEN, baseline=make_model(0))
    other = make_model(1)
    other.tokenizer = AutoTokenizer.from_pretrained(mxquant.bundled.path())
    other.tokenizer.add_tokens(["number"])
    with pytest.raises(MXQuantError, match="tokenizer of model-1 cuts the text differently"):
        evaluate([other], TEXT, seq_len=SEQ_LEN, baseline=make_model(0))
