"""Architectures once more: other formats and dtypes, layers that are repeated, towers that see, classes that load."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from architecture_cases import CASES, MULTIMODAL, TEXT_ALONE, expanded
from safetensors.torch import save_file
from tiny_models import assert_close, logits, make_source, quantizer, same, tensors_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import mxquant
from mxquant.checkpoint.formats.compressed_tensors import ignored
from mxquant.convert.pipeline import plan_model
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.classes import auto_class

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = {"zamba": ("shared_transf", {3: 1}), "zamba2": ("shared_transformer", {3: 1, 4: 2})}
READ_BY_OTHERS = ["phi3", "gpt_neox", "bamba", "granitemoehybrid-dense", *MULTIMODAL]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return quantizer(tmp_path_factory.mktemp)


# --- formats and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CASES)
def test_nvfp4_is_in_the_format_of_others_where_others_can_read_it(kind, tmp_path):
    _, plan = plan_model(make_source(CASES[kind], tmp_path, torch.bfloat16), "nvfp4")
    assert (plan.on_disk == "compressed-tensors") == CASES[kind].compressed, plan.on_disk_reason


@pytest.mark.parametrize("kind", READ_BY_OTHERS)
def test_transformers_alone_reads_nvfp4_of_language_models_and_leaves_towers(kind, quantized):
    pytest.importorskip("compressed_tensors")
    q = quantized(kind, "nvfp4", torch.bfloat16)
    found, expected = (logits(q.loaded(folder), q.case) for folder in (q.path, q.dense))
    assert_close(found, expected, 1e-3)
    packed = logits(mxquant.load(q.path), q.case)
    exact = logits(q.loaded(q.dense, dtype=torch.float32), q.case)
    assert (packed - exact).norm() <= 1.3 * (expected - exact).norm()


def test_ignored_layers_are_named_as_files_and_models_name_them():
    names = {"a.x": "a.x", "vision.fc": "model.vision.fc", "old.q": "new.q", "text.proj": "model.text.proj"}
    found = ignored(names, ["layers.proj", "layers.text.proj"])
    assert found == ["a.x", r"re:(.*\.)?vision\.fc$", "old.q", "new.q", "text.proj", "model.text.proj"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["granite", "mamba2", "llava"])
def test_sources_of_every_dtype(kind, dtype, quantized):
    q = quantized(kind, "ue5m3/16", dtype)
    assert {t.dtype for t in q.before.values()} == {dtype}
    assert {t.dtype for t in q.tensors.values()} == {dtype, torch.uint8}
    model = q.loaded(q.path)
    assert {p.dtype for p in model.parameters()} == {dtype}
    exact = logits(q.loaded(q.dense, dtype=torch.float32), q.case)
    rounded = logits(q.loaded(q.dense), q.case)
    bound = 1e-5 * exact.norm() if dtype == torch.float32 else 1.3 * (rounded - exact).norm()
    assert (logits(model, q.case) - exact).norm() <= bound


# --- layers that a model repeats ------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHARED)
def test_repeated_layers_are_one_layer(kind, quantized, tmp_path):
    q, (part, copies) = quantized(kind), SHARED[kind]
    model = mxquant.load(q.path)
    loaded = set(model.state_dict())
    for module in (model, copy.deepcopy(model)):
        for place, first in copies.items():
            pairs = [
                (module.get_submodule(f"model.layers.{n}.{part}.{name}") for n in (place, first))
                for name in expanded("self_attn.{q,k,v,o}_proj feed_forward.down_proj")
            ]
            assert all(a is b and isinstance(a, mxquant.QuantLinear) for a, b in pairs)
    packed = [m for m in model.modules() if isinstance(m, mxquant.QuantLinear)]
    assert len(packed) == len(q.plan.quantized)
    expected = logits(model, q.case)
    model.tie_weights()
    assert set(model.state_dict()) == loaded
    assert torch.equal(logits(model, q.case), expected)
    model.save_pretrained(tmp_path / "again")
    assert tensors_of(tmp_path / "again").keys() == q.tensors.keys()
    back = model.dequantize()
    place, first = next(iter(copies.items()))
    name = f"{part}.self_attn.q_proj"
    assert back.get_submodule(f"model.layers.{place}.{name}") is back.get_submodule(f"model.layers.{first}.{name}")


@pytest.mark.parametrize("equal", [True, False])
def test_repeated_layers_that_the_files_hold_twice(equal, quantized, tmp_path):
    """The same bytes are written once. Others make a layer of its own, which neither transformers nor we tie."""
    q = quantized("zamba")
    twin = "model.layers.3.shared_transf.self_attn.q_proj.weight"
    original = q.before[twin.replace(".3.", ".1.")]
    source = tmp_path / "source"
    shutil.copytree(q.source, source)
    tensors = q.before | {twin: original.clone() if equal else original.flip(0)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    scheme = QuantScheme.parse("ue5m3/16")
    mxquant.quantize_model(source, tmp_path / "q", scheme)
    written = tensors_of(tmp_path / "q")
    assert (twin in written) != equal
    model = mxquant.load(tmp_path / "q")
    fly = AutoModelForCausalLM.from_pretrained(source, quantization_config=mxquant.MXQuantConfig(**scheme.to_dict()))
    assert_close(logits(fly, q.case), logits(model, q.case))
    layers = [model.model.layers[n].shared_transf.self_attn.q_proj for n in (1, 3)]
    assert (layers[0] is layers[1]) == equal
    if equal:
        assert written.keys() == q.tensors.keys()
        assert all(same(t, q.tensors[name]) for name, t in written.items())
    else:
        expected = mxquant.quantize(original.flip(0), scheme).dequantize()
        assert torch.equal(layers[1].dequantize(), expected)
        assert not torch.equal(layers[0].dequantize(), expected)


# --- multimodal models ----------------------------------------------------------------------------


def test_a_tower_is_quantized_when_a_pattern_names_it(quantized, tmp_path):
    source = quantized("llava").source
    scheme = QuantScheme.parse("ue5m3/16")
    recipe = QuantRecipe(default=scheme, include=(r"vision_tower.*mlp", r"language_model\."))
    plan = mxquant.quantize_model(source, tmp_path / "q", recipe).plan
    tower = {f"{name}.weight" for name in expanded("vision_tower.encoder.layers.0.mlp.fc{1,2}")}
    head = {"language_model.lm_head.weight"}  # the second pattern names it, too
    assert {t.name for t in plan.quantized} == CASES["llava"].quantized | tower | head
    assert {t.kind for t in plan.dense if "vision_tower" in t.name and t.name.endswith("proj.weight")} == {
        "linear outside the language model"
    }
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    oracle = AutoModelForImageTextToText.from_pretrained(tmp_path / "d")
    assert_close(logits(mxquant.load(tmp_path / "q"), CASES["llava"]), logits(oracle, CASES["llava"]))


def test_a_tied_head_that_a_multimodal_checkpoint_holds_is_written_once(quantized, tmp_path):
    q = quantized("gemma3")
    source = tmp_path / "source"
    shutil.copytree(q.source, source)
    twice = q.before | {"lm_head.weight": q.before["language_model.model.embed_tokens.weight"].clone()}
    save_file(twice, source / "model.safetensors", metadata={"format": "pt"})
    mxquant.quantize_model(source, tmp_path / "q", "ue5m3/16")
    assert tensors_of(tmp_path / "q").keys() == q.tensors.keys()


@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_the_language_model_of_a_multimodal_checkpoint_loads_alone(kind, tmp_path):
    case = TEXT_ALONE[kind]
    source = make_source(case, tmp_path / "source", torch.float32)
    plan = mxquant.quantize_model(source, tmp_path / "q", "ue5m3/16").plan
    assert {t.name for t in plan.quantized} == case.quantized
    assert all(t.kind != "linear" for t in plan.dense)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    count = sum(isinstance(m, mxquant.QuantLinear) for m in model.modules())
    assert count == sum(t.kind == "linear" for t in plan.quantized)
    assert_close(logits(model, case), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "d"), case))
    card = (tmp_path / "q/README.md").read_text()
    assert f"model = {case.auto.__name__}.from_pretrained(path" in card
    assert "pipeline_tag: image-text-to-text" in card
    whole = mxquant.load(tmp_path / "q")
    assert type(whole).__name__.endswith("ForConditionalGeneration")
    assert len(whole.state_dict()) > len(model.state_dict())


def test_plain_auto_classes_load_multimodal_models_that_they_know(quantized):
    q = quantized("gemma3")
    model = AutoModelForCausalLM.from_pretrained(q.path)
    assert_close(logits(model, q.case), logits(q.loaded(q.dense), q.case))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llama"}, "AutoModelForCausalLM"),
        ({"model_type": "gemma3"}, "AutoModelForCausalLM"),
        ({"model_type": "llava"}, "AutoModelForImageTextToText"),
        ({"model_type": "qwen2_audio"}, "AutoModelForMultimodalLM"),
        ({"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}, "AutoModelForImageTextToText"),
        ({"model_type": "llama4", "architectures": ["Llama4ForCausalLM"]}, "AutoModelForCausalLM"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "AutoModelForCausalLM"),
        ({"model_type": "own"}, "AutoModelForCausalLM"),
        ({}, "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_loads_a_checkpoint(config, name):
    assert auto_class(config).__name__ == name


# --- architectures that nobody knows --------------------------------------------------------------


def test_unknown_architectures_are_refused_before_the_work(quantized, tmp_path):
    shutil.copytree(quantized("llama").source, tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    for model_type, message in (("lamma", "not a model known to transformers"), ("bert", "lacks")):
        (tmp_path / "source/config.json").write_text(json.dumps(config | {"model_type": model_type}))
        with pytest.raises(mxquant.MXQuantError, match=message):
            mxquant.quantize_model(tmp_path / "source", tmp_path / "q", "ue5m3/16")
        assert not (tmp_path / "q").exists()
