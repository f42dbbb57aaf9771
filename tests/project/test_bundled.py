"""The bundled model and the text it is trained and evaluated on."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from mxquant import bundled
from mxquant.bundled import text

CONTEXT = 512


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled.path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.path())


def paragraphs(part: str) -> set[str]:
    """Paragraphs long enough to be told apart from common phrases, white space collapsed."""
    every = "\n\n".join(text.documents(part)).split("\n\n")
    return {key for p in every if len(key := " ".join(p.split())) >= 40}


def test_splits_share_no_paragraph():
    heldout, train = paragraphs("heldout"), paragraphs("train")
    assert len(heldout) > 500
    assert len(train) > 5000
    assert not heldout & train


def test_split_is_whole_documents_in_fixed_proportion():
    heldout, train = text.documents("heldout"), text.documents("train")
    assert len(set(heldout)) == len(heldout)
    share = sum(map(len, heldout)) / sum(map(len, heldout + train))
    assert 0.05 < share < 0.09
    assert text.heldout_text() == "\n\n".join(heldout)


def test_text_is_the_same_on_every_reading():
    before = text.provenance()
    text._read.cache_clear()
    assert text.provenance() == before
    assert len(before["heldout_sha256"]) == 64


def test_split_depends_on_names_alone():
    # Fixed for good: moving a name would put training text into the held-out part.
    assert text._split_of("topic:typesseq") == text._split_of(text._group("json")) == "heldout"
    assert text._split_of("topic:types") == text._split_of(text._group("email")) == "train"
    assert text._group("_pydecimal") == text._group("_decimal") == text._group("decimal")


def test_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="heldout"):
        text.documents("test")


def test_checkpoint_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in bundled.path().iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} <= set(files)
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert files["model.safetensors"] <= 4_000_000
    assert sum(files.values()) <= 4_500_000
    assert "Apache-2.0" in (bundled.path() / "README.md").read_text(encoding="utf-8")


def test_model_is_the_documented_llama(model):
    config = model.config
    assert (config.model_type, config.tie_word_embeddings) == ("llama", True)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert model.num_parameters() == 1_711_840
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert all(m.in_features % 32 == 0 and m.out_features % 32 == 0 for m in linear)


@pytest.mark.parametrize("sample", ["def f(x):\n\n    return x\t# ½ 日本\n", " leading", ""])
def test_tokenizer_adds_bos_and_round_trips(tokenizer, sample):
    ids = tokenizer(sample)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == sample


def test_heldout_loss_is_far_below_unigram(model, tokenizer):
    ids = tokenizer(text.heldout_text(), return_tensors="pt")["input_ids"][0]
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)[::6]
    targets = windows[:, 1:].flatten()
    with torch.inference_mode():
        logits = copy.deepcopy(model).float()(input_ids=windows).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), targets).item()
    # The strongest unigram there is: it has seen the very tokens that it predicts.
    counts = Counter(targets.tolist())
    unigram = -sum(n * math.log(n / len(targets)) for n in counts.values()) / len(targets)
    assert loss < unigram - 1.5


def test_model_continues_text(model, tokenizer):
    prompt = tokenizer("Return a copy of the", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=30, do_sample=False)
    words = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(set(words.split())) >= 5  # more than one word, over and over
