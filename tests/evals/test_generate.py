"""``mxquant generate``: the text transformers makes, as it is made, from packed weights."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from click.testing import CliRunner

import mxquant
import mxquant.bundled
from mxquant.cli.main import main
from mxquant.errors import MXQuantError
from mxquant.evals.generation import GenerateSettings, generate
from mxquant.evals.models import load_model
from mxquant.nn.quant_linear import QuantLinear

PROMPT = "Return a list of"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def run(*args, text=None):
    return CliRunner().invoke(main, [str(a) for a in args], input=text)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "packed"
    mxquant.quantize_model(mxquant.bundled.path(), folder, "ue5m3/16")
    return folder


@pytest.fixture(scope="module")
def chatty(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(packed, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def model(packed):
    return load_model(packed, device="cpu", dtype="float32")  # in bf16, tokens may be equally likely


class NoSpecialTokens:
    chat_template = None

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, text, **options):
        return self._tokenizer(text, add_special_tokens=False, **options)


def settings(**changes):
    return GenerateSettings(**{"max_new_tokens": 12, **changes})


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_the_text_is_that_of_transformers_and_weights_stay_packed(kind, packed):
    model = load_model(packed if kind == "packed" else mxquant.bundled.path(), device="cpu")
    assert any(isinstance(m, QuantLinear) for m in model.model.modules()) == (kind == "packed")
    found = generate(model, PROMPT, settings())
    inputs = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        tokens = model.model.generate(inputs, max_new_tokens=12, do_sample=False)[0]
    assert found.text == model.tokenizer.decode(tokens[inputs.shape[1] :], skip_special_tokens=True)
    assert (found.tokens, found.prompt_tokens) == (12, inputs.shape[1])
    assert found.stopped == "--max-new-tokens"
    assert found.tokens_per_second == pytest.approx(11 / found.seconds)
    assert (found.weight_bytes < 1.6e6) == (kind == "packed")


def test_pieces_come_while_the_model_still_works(model):
    pieces, calls = [], []
    forward = model.model.forward

    def counted(*args, **kwargs):
        calls.append(None)
        return forward(*args, **kwargs)

    model.model.forward = counted
    try:
        found = generate(model, PROMPT, settings(max_new_tokens=24), lambda text: pieces.append((len(calls), text)))
    finally:
        del model.model.forward
    assert "".join(text for _, text in pieces) == found.text
    assert pieces[0][0] < len(calls) / 2
    assert len({when for when, _ in pieces}) > 3


def test_draws_depend_on_the_seed_alone(model):
    def draw(**changes):
        return generate(model, PROMPT, settings(temperature=1.0, **changes)).text

    assert draw(seed=1) == draw(seed=1)
    assert len({draw(seed=s) for s in range(4)}) > 1
    # The likeliest token alone is left of a tiny probability.
    assert draw(seed=1, top_p=1e-6) == generate(model, PROMPT, settings()).text


def test_what_the_checkpoint_says_of_sampling_is_not_mixed_in(model):
    expected = generate(model, PROMPT, settings(temperature=1.0, seed=5)).text
    config = model.model.generation_config
    before = config.top_k, config.temperature
    config.top_k, config.temperature = 1, 0.1
    try:
        assert generate(model, PROMPT, settings(temperature=1.0, seed=5)).text == expected
    finally:
        config.top_k, config.temperature = before


def test_a_chat_template_is_used_if_there_is_one_unless_told_otherwise(chatty, model):
    talker = load_model(chatty, device="cpu", dtype="float32")
    raw = generate(model, PROMPT, settings())
    assert not raw.chat
    chat = generate(talker, PROMPT, settings())
    assert chat.chat
    inputs = model.tokenizer(f"[user] {PROMPT}\n>", add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        tokens = model.model.generate(inputs, max_new_tokens=12, do_sample=False)[0, inputs.shape[1] :]
    assert chat.text == model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert chat.prompt_tokens == inputs.shape[1]
    assert generate(talker, PROMPT, settings(chat=False)).text == raw.text
    with pytest.raises(MXQuantError, match="no chat template"):
        generate(model, PROMPT, settings(chat=True))


def test_a_prompt_without_tokens_is_refused(model):
    assert generate(model, "", settings()).prompt_tokens == 1  # the token that begins a text
    bare = dataclasses.replace(model, tokenizer=NoSpecialTokens(model.tokenizer))
    with pytest.raises(MXQuantError, match="no tokens"):
        generate(bare, "", settings())


def test_it_ends_where_the_text_or_the_model_does(model):
    positions = model.model.config.max_position_embeddings
    long = "a " * (positions - 8)
    found = generate(model, long, settings(max_new_tokens=500))
    assert found.prompt_tokens + found.tokens == positions
    assert found.stopped == "the model's last position"
    with pytest.raises(MXQuantError, match="shorten"):
        generate(model, long * 2, settings())
    config = model.model.generation_config
    before, second = config.eos_token_id, model.tokenizer(generate(model, PROMPT, settings()).text).input_ids[2]
    config.eos_token_id = second
    try:
        ended = generate(model, PROMPT, settings())
    finally:
        config.eos_token_id = before
    assert ended.tokens < 12
    assert ended.stopped == "end of text"


def test_standard_output_is_the_text_alone_and_standard_error_has_the_figures(packed, model):
    expected = generate(model, PROMPT, settings()).text
    quick = ("--max-new-tokens", 12, "--device", "cpu", "--dtype", "float32")
    result = run("generate", packed, PROMPT, *quick)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{expected}\n"
    for words in ("tokens/s", "12 new", "fp4-ue5m3-b16", "4.50 bits", "held in all"):
        assert words in result.stderr
    data = json.loads(run("generate", packed, "-", *quick, "--json", text=PROMPT).stdout)
    assert (data["text"], data["prompt"], data["tokens"]) == (expected, PROMPT, 12)


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (("./nowhere", "x"), "nowhere", 1),
        (("MODEL", "x", "--chat"), "no chat template", 1),
        (("MODEL", "x", "--device", "no-such"), "no-such", 1),
        (("MODEL", "x", "--top-p", "0.5"), "--temperature", 2),
        (("MODEL", "x", "--max-new-tokens", "0"), "0", 2),
        (("MODEL",), "PROMPT", 2),
    ],
)
def test_a_wrong_request_gives_one_line(args, message, code, packed):
    result = run("generate", *(packed if a == "MODEL" else a for a in args))
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout
    if code == 1:
        assert len(result.stderr.strip().splitlines()) == 1
