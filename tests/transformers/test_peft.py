"""LoRA on packed models: gradients, training, saving, and what cannot be done."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mxquant
from mxquant.errors import AdapterError

peft = pytest.importorskip("peft")

TOKENS = torch.tensor([[1, 17, 5, 30, 3, 42, 9, 60]])
SCHEMES = {"ue5m3": "ue5m3/16/absmax", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}
TARGETS = {
    "llama-tied": ["q_proj", "v_proj", "down_proj"],
    "qwen2": ["q_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "mixtral-even": ["q_proj", "o_proj"],
}
CASES = [("llama-tied", "ue5m3"), ("qwen2", "nvfp4"), ("gpt2", "mxfp8"), ("mixtral-even", "ue5m3")]


@pytest.fixture(scope="module")
def quantize(make_checkpoint, tmp_path_factory):
    """``quantize(kind, scheme)`` -> folder of a quantized checkpoint."""
    made = {}

    def make(kind="llama-tied", scheme="ue5m3"):
        if (kind, scheme) not in made:
            made[kind, scheme] = tmp_path_factory.mktemp("packed") / kind
            mxquant.quantize_model(
                make_checkpoint(kind), made[kind, scheme], mxquant.QuantScheme.parse(SCHEMES[scheme])
            )
        return made[kind, scheme]

    return make


def _config(targets, **options):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)


def _adapted(model, targets, seed=0):
    """The model with adapters whose both matrices are random, so that gradients reach both."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, _config(targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _adapters(model):
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def _encodings(model):
    return {n: b.clone() for n, b in model.named_buffers() if b.dtype in (torch.uint8, torch.float8_e4m3fn)}


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_gradients_are_those_on_the_dequantized_model(kind, scheme, quantize):
    path = quantize(kind, scheme)
    packed = _adapted(AutoModelForCausalLM.from_pretrained(path), TARGETS[kind])
    dense = _adapted(AutoModelForCausalLM.from_pretrained(path).dequantize(), TARGETS[kind])
    assert any(isinstance(m, mxquant.QuantLinear) for m in packed.modules())
    assert not any(isinstance(m, mxquant.QuantLinear) for m in dense.modules())
    losses = [model(TOKENS, labels=TOKENS).loss for model in (packed, dense)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    ours, theirs = _adapters(packed), _adapters(dense)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 2 * 2 * len(TARGETS[kind])
    for name, parameter in theirs.items():
        assert parameter.grad.norm() > 0
        assert (ours[name].grad - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
    assert {n for n, p in packed.named_parameters() if p.grad is not None} == set(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_learns_and_leaves_the_packed_weights_alone(dtype, quantize, tmp_path):
    model = _adapted(AutoModelForCausalLM.from_pretrained(quantize(), dtype=dtype), ["q_proj", "v_proj", "up_proj"])
    before = _encodings(model)
    model.train()
    optimizer = torch.optim.AdamW(_adapters(model).values(), lr=2e-2)
    losses = []
    for _ in range(25):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.8
    assert _same(_encodings(model), before)
    # The adapter alone is saved; put on the same base, it gives the same model.
    model.eval()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == {n.replace(".default.", ".") for n in _adapters(model)}
    base = AutoModelForCausalLM.from_pretrained(quantize(), dtype=dtype)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert torch.equal(again(TOKENS).logits, expected)
        with again.disable_adapter():
            plain = again(TOKENS).logits
        assert torch.equal(plain, AutoModelForCausalLM.from_pretrained(quantize(), dtype=dtype)(TOKENS).logits)
        assert not torch.equal(plain, expected)


def test_training_with_checkpointed_activations_gives_the_same_gradients(quantize):
    grads = []
    for checkpointing in (False, True):
        model = _adapted(AutoModelForCausalLM.from_pretrained(quantize()), ["q_proj", "down_proj"])
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        grads.append({n: p.grad for n, p in _adapters(model).items()})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_the_trainer_of_transformers_takes_it(quantize, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = _adapted(AutoModelForCausalLM.from_pretrained(quantize()), ["q_proj", "v_proj"])
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in _adapters(model).items()}
    Trainer(model, arguments, train_dataset=rows).train()
    assert any(not torch.equal(p, before[n]) for n, p in _adapters(model).items())


def test_all_linear_means_the_packed_layers_too(quantize):
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(quantize("llama-tied")), _config("all-linear"))
    adapted = {n.partition(".lora_A")[0].rpartition(".")[2] for n in _adapters(model) if ".lora_A." in n}
    assert adapted == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}


def test_several_adapters_and_none_again(quantize):
    model = _adapted(AutoModelForCausalLM.from_pretrained(quantize()), ["q_proj"])
    first = model(TOKENS).logits
    model.add_adapter("second", _config(["q_proj", "o_proj"]))
    model.set_adapter("second")
    assert not torch.equal(model(TOKENS).logits, first)
    model.set_adapter("default")
    assert torch.equal(model(TOKENS).logits, first)
    assert torch.equal(model.unload()(TOKENS).logits, AutoModelForCausalLM.from_pretrained(quantize())(TOKENS).logits)


def test_adapters_that_transformers_puts_on(quantize, tmp_path):
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers wants peft {MIN_PEFT_VERSION} for it")
    own = AutoModelForCausalLM.from_pretrained(quantize())
    own.add_adapter(_config(["q_proj"], init_lora_weights=False))
    expected = own(TOKENS).logits
    own.save_pretrained(tmp_path)  # the adapter
    again = AutoModelForCausalLM.from_pretrained(quantize())
    again.load_adapter(tmp_path)
    assert torch.equal(again(TOKENS).logits, expected)


def test_merging_is_refused_as_a_whole_and_the_way_named_works(quantize, tmp_path):
    path = quantize("llama")
    model = _adapted(AutoModelForCausalLM.from_pretrained(path), ["q_proj", "embed_tokens"])  # the latter is dense
    expected = model(TOKENS).logits
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(AdapterError, match="merge it into the dense model"):
            merge()
        assert torch.equal(model(TOKENS).logits, expected)
    model.save_pretrained(tmp_path / "adapter")
    dense = mxquant.load(path).dequantize()
    merged = peft.PeftModel.from_pretrained(dense, tmp_path / "adapter").merge_and_unload()
    assert (merged(TOKENS).logits - expected).norm() <= 1e-5 * expected.norm()
    merged.save_pretrained(tmp_path / "merged")
    report = mxquant.quantize_model(tmp_path / "merged", tmp_path / "out", "nvfp4")
    assert len(report.plan.quantized) == 14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "packed layers have none; use plain LoRA"),
        ({"init_lora_weights": "pissa"}, "'pissa' starts from the layer's dense weight"),
        ({"init_lora_weights": "loftq"}, "'loftq' starts from"),
        ({"init_lora_weights": "olora"}, "'olora' starts from"),
    ],
    ids=str,
)
def test_kinds_of_lora_that_need_dense_weights_are_refused(options, message, quantize):
    model = AutoModelForCausalLM.from_pretrained(quantize())
    before = _encodings(model)
    if options.get("init_lora_weights") == "loftq":
        options = {**options, "loftq_config": peft.LoftQConfig()}
        pytest.importorskip("scipy")
    with pytest.raises(AdapterError, match=message):
        peft.get_peft_model(model, _config(["q_proj"], **options))
    assert _same(_encodings(model), before)


def test_packed_experts_take_no_adapters_and_say_so(quantize):
    model = AutoModelForCausalLM.from_pretrained(quantize("mixtral-even"))
    for target in ({"target_parameters": ["mlp.experts.down_proj"]}, {"target_modules": ["experts"]}):
        with pytest.raises(ValueError, match=r"no `target_parameters` found|is not supported"):
            peft.get_peft_model(model, peft.LoraConfig(r=4, **target))


def test_dense_models_are_not_touched(make_checkpoint):
    dense = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(make_checkpoint("llama")), _config("all-linear"))
    assert not any("Quant" in type(m).__name__ for m in dense.modules())
    dense.merge_and_unload()
