"""Every architecture: exactly the layers on the list are quantized, and packed models are what their dense twins are.

The oracle of each model is made in ``tiny_models.py``: every matrix of the files that is on the list
is quantized by itself and decoded, and transformers alone loads the result.
"""

from __future__ import annotations

import re

import pytest
from architecture_cases import CASES
from tiny_models import assert_close, logits, quantizer, same, tensors_of

import mxquant
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.architectures import build_meta_model

pytestmark = pytest.mark.usefixtures("one_thread")

# What a dense tensor is, by its name; the first that fits. The code decides by classes.
_TOWERS = r"vision|visual|audio_tower|multi_modal_projector|connector"
KINDS = (
    (r"(lm_head|embed_out)\.weight$", "output head"),
    (r"\.(A_log|D|dt_bias|dt_proj\.(weight|bias)|(x|dt)_proj_(weight|bias))$", "state space"),
    (r"(conv\w*|patch_embedding|patch_embed\.proj|patch_conv)\.weight$", "convolution"),
    (r"(\bembed\w*|position_embedding|wte|wpe|word_embeddings)\.weight$", "embedding"),
    (r"(norm\w*|layrnorm|ln_\w+|ln_q)(\.\d+)?\.weight$", "norm"),
    (r"(router\.layer|router|gate)\.weight$", "router"),
    (r"e_score_correction_bias$", "buffer"),
    (r"\.bias$", "bias"),
    (rf"({_TOWERS}).*\.weight$", "linear outside the language model"),
    (rf"({_TOWERS})", "outside the language model"),
)
REASONS = {
    "router": "router of experts",
    "state space": "parameter of a state space",
    "linear outside the language model": "outside the language model",
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return quantizer(tmp_path_factory.mktemp)


@pytest.mark.parametrize("kind", CASES)
def test_exactly_the_layers_on_the_list_are_quantized(kind, quantized):
    q, case = quantized(kind), CASES[kind]
    plan = q.plan
    assert {t.name for t in plan.quantized} == case.quantized
    assert {t.kind for t in plan.quantized} <= {"linear", "experts"}
    for t in plan.dense:
        wanted = next((kind for pattern, kind in KINDS if re.search(pattern, t.name)), None)
        assert (t.kind, t.reason) == (wanted, REASONS.get(wanted, wanted)), t.name
    assert set(plan.tied) == case.tied
    assert {t.name for t in plan.tensors} == q.before.keys()


@pytest.mark.parametrize("kind", CASES)
def test_planning_needs_no_memory_for_weights(kind, quantized):
    assert {p.device.type for p in build_meta_model(quantized(kind).source).parameters()} == {"meta"}


@pytest.mark.parametrize("kind", CASES)
def test_a_packed_model_is_the_dense_model_of_its_decoded_weights(kind, quantized):
    q, case = quantized(kind), CASES[kind]
    assert q.plan.on_disk == "mxquant"
    untouched = q.before.keys() - case.quantized
    assert all(same(q.tensors[name], q.before[name]) for name in untouched)
    assert not case.tied & q.tensors.keys()
    oracle, model = q.loaded(q.dense), q.loaded(q.path)
    expected, original = logits(oracle, case), logits(q.loaded(q.source), case)
    assert_close(logits(model, case), expected)
    assert (expected - original).norm() > 1e-3 * original.norm()
    if "lm_head.weight" in case.tied:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found = mxquant.load(q.path)
    assert type(found) is type(model)
    back = found.dequantize()
    assert_close(logits(back, case), expected)
    wanted = oracle.state_dict()
    assert all(same(t, wanted[name]) for name, t in back.state_dict().items())
    assert not any(isinstance(m, mxquant.QuantLinear) for m in back.modules())


@pytest.mark.parametrize("kind", CASES)
def test_quantizing_on_the_fly_and_saving_give_the_same_bytes(kind, quantized, tmp_path):
    q, case = quantized(kind), CASES[kind]
    config = mxquant.MXQuantConfig(**QuantScheme.parse("ue5m3/16").to_dict())
    model = q.loaded(q.source, quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert saved.keys() == q.tensors.keys()
    assert all(same(t, q.tensors[name]) for name, t in saved.items())
    assert_close(logits(q.loaded(tmp_path / "saved"), case), logits(model, case))
    mxquant.dequantize_model(q.path, tmp_path / "dense")
    dense, expected = tensors_of(tmp_path / "dense"), tensors_of(q.dense)
    assert dense.keys() == expected.keys()
    assert all(same(t, expected[name]) for name, t in dense.items())
