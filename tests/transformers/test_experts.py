"""Mixtures of experts: which matrices are quantized, and that models of packed ones are what their dense twins are.

The oracle of each model is made here: every matrix of the files is quantized by itself and decoded,
and transformers alone loads the result.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from expert_kinds import KINDS
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import mxquant
from mxquant.checkpoint.formats.native import with_wildcards
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError, PlanError, SchemeError
from mxquant.evals import experts as dense_experts
from mxquant.ops.operators import quantize_activations
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.experts import QuantExperts

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
STACKED = {"llama4": True, "gpt-oss": True, "granite-moe": False}  # and whether the files hold [experts, in, out]
SCHEMES = ["ue5m3/16", "nvfp4", "e8m0/32", "ue5m3/16x16", "mxfp8"]
CASES = [*((kind, "ue5m3/16") for kind in KINDS), *((k, s) for k in ("mixtral-even", "gpt-oss") for s in SCHEMES[1:])]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def bytes_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def packed_modules(model: torch.nn.Module) -> list[QuantExperts]:
    return [m for m in model.modules() if isinstance(m, QuantExperts)]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).norm() <= 1e-5 * b.norm()


def decoded(name: str, weight: torch.Tensor, scheme: QuantScheme, kind: str, divisors: torch.Tensor | None):
    """The tensor that a quantized one stands for, matrix by matrix."""
    if weight.ndim == 2:
        return mxquant.quantize(weight, scheme, name=name, global_scale=divisors).dequantize(weight.dtype)
    made = []
    for e, matrix in enumerate(weight):
        given = None if divisors is None else divisors[e : e + 1]
        matrix = matrix.t().contiguous() if STACKED[kind] else matrix
        q = mxquant.quantize(matrix, scheme, name=f"{name}.{e}", global_scale=given)
        made.append(q.dequantize(weight.dtype).t() if STACKED[kind] else q.dequantize(weight.dtype))
    return torch.stack(made)


def with_tensors(folder: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(folder, out)
    for file in out.glob("*.safetensors"):
        file.unlink()
    save_file({k: t.contiguous() for k, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    return out


class Quantized:
    """A checkpoint of a kind quantized, and the dense one that it stands for."""

    def __init__(self, source: Path, folder: Path, kind: str, text: str):
        self.source, self.path = source, folder / "q"
        scheme = QuantScheme.parse(text)
        self.report = mxquant.quantize_model(source, self.path, scheme)
        before, self.tensors = tensors_of(source), tensors_of(self.path)
        quantized = {t.name for t in self.report.plan.quantized}
        dense = {
            name: decoded(name, t, scheme, kind, self.tensors.get(f"{name}_global_scale")) if name in quantized else t
            for name, t in before.items()
        }
        self.dense = with_tensors(source, folder / "dense", dense)


@pytest.fixture(scope="module")
def quantized(make_checkpoint, tmp_path_factory):
    made: dict[tuple[str, str], Quantized] = {}

    def make(kind: str, text: str) -> Quantized:
        if (kind, text) not in made:
            made[kind, text] = Quantized(make_checkpoint(kind), tmp_path_factory.mktemp("experts"), kind, text)
        return made[kind, text]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_quantizes_experts_and_leaves_routers(kind, make_checkpoint):
    _, plan = plan_model(make_checkpoint(kind), "ue5m3/16")
    found: dict[str, set[str]] = {}
    for t in plan.tensors:
        found.setdefault(t.kind, set()).add(with_wildcards(t.name).removeprefix("model.layers.*."))
    assert (found["experts"], found["router"]) == KINDS[kind]
    assert {t.kind for t in plan.quantized} == {"linear", "experts"}
    others = [t for t in plan.dense if t.kind == "other parameter"]
    assert {t.kind for t in plan.dense} - {"other parameter"} <= {
        *("router", "norm", "bias", "embedding", "output head", "buffer")
    }
    # Its sinks, one number a head.
    assert {t.reason for t in others} == ({"other parameter of GptOssAttention"} if kind == "gpt-oss" else set())
    assert {t.reason for t in plan.dense if t.kind == "router"} == {"router of experts"}
    shared = {"qwen2-moe": "shared_expert.", "deepseek-v3": "shared_experts.", "llama4": "shared_expert."}.get(kind)
    assert not shared or sum(shared in name for name in found["linear"]) == 3
    experts = [t for t in plan.quantized if t.kind == "experts"]
    assert {t.experts for t in experts} == ({4} if kind in STACKED else {None})
    assert {t.transposed for t in experts} == {STACKED.get(kind, False)}
    assert plan.quantization_config["format_version"] == (3 if kind in STACKED else 1)


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_a_packed_model_is_the_dense_model_of_its_decoded_weights(kind, text, quantized, tmp_path):
    q = quantized(kind, text)
    oracle = AutoModelForCausalLM.from_pretrained(q.dense)
    model = mxquant.load(q.path, dtype=torch.float32)
    assert len(packed_modules(model)) == (1 if kind == "deepseek-v3" else 2)
    assert_close(logits(model), logits(oracle))
    mxquant.dequantize_model(q.path, tmp_path / "d", dtype=torch.float32)
    dense, expected = tensors_of(tmp_path / "d"), tensors_of(q.dense)
    assert dense.keys() == expected.keys()
    assert all(same(t, expected[name]) for name, t in dense.items())
    before = tensors_of(q.source)
    untouched = [t.name for t in q.report.plan.dense]
    assert all(same(q.tensors[name], before[name]) for name in untouched)
    assert any("router" in name or ".gate." in name for name in untouched)
    shapes = {t.name: before[t.name].shape for t in q.report.plan.quantized if t.outputs[0].name == t.name}
    assert all(q.tensors[name].shape != shape for name, shape in shapes.items())
    back = model.dequantize()
    assert not packed_modules(back)
    assert torch.equal(logits(back), logits(oracle))


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_loading_saving_and_quantizing_on_the_fly_agree_on_every_byte(kind, text, quantized, tmp_path):
    q = quantized(kind, text)
    model = mxquant.load(q.path, dtype=torch.float32)
    config = mxquant.MXQuantConfig(**QuantScheme.parse(text).to_dict())
    fly = AutoModelForCausalLM.from_pretrained(q.source, quantization_config=config)
    expected, found = bytes_of(model), bytes_of(fly)
    assert expected.keys() == found.keys()
    assert all(same(t, found[name]) for name, t in expected.items())
    for number, m in enumerate((model, fly)):
        m.save_pretrained(tmp_path / str(number))
        saved = tensors_of(tmp_path / str(number))
        if q.report.plan.on_disk == "mxquant":
            assert saved.keys() == q.tensors.keys()
            assert all(same(t, q.tensors[name]) for name, t in saved.items())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert torch.equal(logits(again), logits(model))


def test_memory_held_is_that_of_the_packed_matrices(quantized):
    for kind, (rows, columns, width) in {"mixtral-even": (64, 64, 32), "gpt-oss": (96, 64, 48)}.items():
        for m in packed_modules(mxquant.load(quantized(kind, "nvfp4").path)):
            held = sum(b.nbytes for b in m.buffers())
            weights = 4 * (rows * columns + columns * width)
            assert held == weights // 2 + weights // 16 + 2 * 4 * 4
            assert {p for p, _ in m.named_parameters()} == (
                {"gate_up_proj_bias", "down_proj_bias"} if kind == "gpt-oss" else set()
            )


@pytest.mark.parametrize("kind", ["mixtral-even", "llama4"])
def test_casting_copying_and_pickling_keep_the_encodings(kind, quantized):
    model = mxquant.load(quantized(kind, "nvfp4").path)
    for m in packed_modules(model):
        before = {name: b.clone() for name, b in m.named_buffers()}
        torch.save(m, file := io.BytesIO())
        file.seek(0)
        for other in (copy.deepcopy(m), torch.load(file, weights_only=False), m.bfloat16(), m.to(torch.float16)):
            assert isinstance(other, QuantExperts)
            after = dict(other.named_buffers())
            assert before.keys() == after.keys()
            assert all(same(b, after[name]) for name, b in before.items())
            assert "nvfp4" in repr(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, quantized):
    q = quantized("gpt-oss", "ue5m3/16")
    found = logits(mxquant.load(q.path, dtype=dtype))
    exact = logits(AutoModelForCausalLM.from_pretrained(q.dense))
    rounded = logits(AutoModelForCausalLM.from_pretrained(q.dense, dtype=dtype))
    assert found.dtype == dtype
    assert (found - exact).norm() <= 1.3 * (rounded - exact).norm()


def test_gradients_pass_through_packed_experts(quantized):
    q = quantized("mixtral-even", "ue5m3/16")
    grads = []
    for model in (mxquant.load(q.path), AutoModelForCausalLM.from_pretrained(q.dense)):
        x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        model(inputs_embeds=x, labels=TOKENS).loss.backward()
        grads += [(x.grad, model.model.layers[0].mlp.gate.weight.grad)]
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_offloaded_experts_and_the_bare_base_model(quantized, tmp_path):
    q = quantized("gpt-oss", "nvfp4")
    expected = logits(mxquant.load(q.path))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"lm_head": "disk", "model.rotary_emb": "cpu"}
    model = mxquant.load(q.path, device_map=places, offload_folder=tmp_path, offload_buffers=True)
    assert torch.equal(logits(model), expected)
    base = AutoModel.from_pretrained(q.path)
    assert len(packed_modules(base)) == 2
    with torch.no_grad():
        assert torch.equal(mxquant.load(q.path).lm_head(base(TOKENS).last_hidden_state), expected)


# --- the module by itself -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ue5m3/16", "e4m3+global/16", "e4m3+token/16"])
@pytest.mark.parametrize("kind", ["mixtral-even", "gpt-oss"])
def test_activations_are_quantized_before_both_products(kind, text, make_checkpoint, quantized, tmp_path):
    scheme = QuantScheme.parse("ue5m3/16")
    recipe = QuantRecipe(default=scheme, activations=ActivationScheme.parse(text))
    mxquant.quantize_model(make_checkpoint(kind), tmp_path / "q", recipe)
    model = mxquant.load(tmp_path / "q")
    oracle = AutoModelForCausalLM.from_pretrained(quantized(kind, "ue5m3/16").dense)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    index = torch.randint(0, 4, (9, 1), generator=torch.Generator().manual_seed(2))
    index = torch.cat([index, (index + 1) % 4], 1)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(4))
    rounded = partial(quantize_activations, scheme=ActivationScheme.parse(text))
    for m, dense in zip(packed_modules(model), [layer.mlp.experts for layer in oracle.model.layers], strict=True):
        with torch.no_grad():
            found = m(x, index, weights)
            expected = dense_experts.forward(dense, rounded, x, index, weights)
            plain = dense(x, index, weights)
        # A value that sums in another order may fall on the other side of a tie.
        assert (found - expected).norm() <= 0.02 * (plain - expected).norm()


@pytest.mark.parametrize("count", [0, 1, 40])
def test_plain_experts_tokens_without_an_expert_and_experts_without_tokens(count):
    import transformers as hf
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    from mxquant.checkpoint.formats.native import ModuleEntry
    from mxquant.transformers.experts import pack_experts, unpack_experts
    from mxquant.transformers.onthefly import quantize_experts

    config = hf.NemotronHConfig(hidden_size=48, moe_intermediate_size=40, n_routed_experts=5, mlp_hidden_act="relu2")
    dense = NemotronHExperts(config)
    generator = torch.Generator().manual_seed(0)
    for p in dense.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    packed, scheme = copy.deepcopy(dense), QuantScheme.parse("ue5m3/8")
    entries = {n: ModuleEntry(n, scheme, tuple(p.shape[1:]), experts=5) for n, p in dense.named_parameters()}
    made = [
        quantize_experts(n, e, [[("", lambda m=m: m) for m in getattr(dense, n).data]], 0) for n, e in entries.items()
    ]
    pack_experts(packed, entries)
    packed.load_state_dict({k: v for buffers in made for k, v in buffers.items()})
    for name, p in dense.named_parameters():
        p.data = packed.dequantize(name)
    x = torch.randn(count, 48, generator=generator)
    index = torch.randint(0, 2, (count, 3), generator=generator) * 3 + torch.tensor([0, 1, 2])  # 5 stands for none
    weights = torch.rand(count, 3, generator=generator)
    expected = torch.zeros(count, 48)
    for token, slot in ((t, s) for t in range(count) for s in range(3) if index[t, s] < 5):
        e = index[token, slot]
        h = (dense.up_proj[e].data @ x[token]).relu().square()
        expected[token] += weights[token, slot] * (dense.down_proj[e].data @ h)
    torch.testing.assert_close(packed(x, index, weights), expected, rtol=1e-4, atol=1e-2)
    unpack_experts(packed, torch.float32)
    assert type(packed) is NemotronHExperts
    assert all(torch.equal(p, dict(dense.named_parameters())[n]) for n, p in packed.named_parameters())


# --- recipes and what cannot be done --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral-even", "gpt-oss"])
def test_experts_may_be_packed_in_some_layers_or_in_one_of_two_products(kind, make_checkpoint, tmp_path):
    source = make_checkpoint(kind)
    exclude = [r"layers\.0\..*experts", r"layers\.1\..*(w2|experts\.down_proj)"]
    scheme = QuantScheme.parse("nvfp4")
    mxquant.quantize_model(source, tmp_path / "q", QuantRecipe(default=scheme, exclude=tuple(exclude)))
    model = mxquant.load(tmp_path / "q")
    (m,) = packed_modules(model)
    assert list(m.entries) == ["gate_up_proj"]
    assert isinstance(m.down_proj, torch.nn.Parameter)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "d")))
    config = mxquant.MXQuantConfig(**scheme.to_dict(), exclude=exclude)
    fly = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    assert all(same(t, fly.state_dict()[name]) for name, t in model.state_dict().items())
    fly.save_pretrained(tmp_path / "s")
    assert all(same(t, tensors_of(tmp_path / "q")[name]) for name, t in tensors_of(tmp_path / "s").items())


@pytest.mark.parametrize(
    ("kind", "recipe", "message"),
    [
        ("mixtral-even", {"rules": {"w1": "nvfp4"}, "default": "mxfp8"}, "need one format.*w1.* would be nvfp4"),
        ("mixtral-even", {"rules": {r"experts\.2": "dense"}, "default": "mxfp8"}, "need one format"),
        ("qwen3-moe", {"default": "ue5m3/32x32"}, "48 rows.*tiles"),
    ],
)
def test_experts_that_cannot_be_packed_as_asked_are_refused(kind, recipe, message, make_checkpoint, tmp_path):
    with pytest.raises(PlanError, match=message) as caught:
        mxquant.quantize_model(make_checkpoint(kind), tmp_path / "q", QuantRecipe.from_dict(recipe))
    assert all(p.endswith("(and 1 more like it)") for p in caught.value.problems)
    with pytest.raises(SchemeError, match=message):
        AutoModelForCausalLM.from_pretrained(
            make_checkpoint(kind), quantization_config=mxquant.MXQuantConfig(recipe=recipe)
        )


def test_lost_and_misshapen_experts_are_told_before_the_work(make_checkpoint, tmp_path):
    tensors = tensors_of(make_checkpoint("mixtral-even"))
    tensors.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight")
    tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"] = torch.zeros(5)
    source = with_tensors(make_checkpoint("mixtral-even"), tmp_path / "source", tensors)
    with pytest.raises(PlanError) as caught:
        mxquant.quantize_model(source, tmp_path / "q", "ue5m3/16")
    text = "; ".join(caught.value.problems)
    assert "1 of the 8 tensors that make up model.layers.1.mlp.experts.gate_up_proj are missing" in text
    assert "experts.1.w2.weight: [5] in the file, but the config says [64, 32]" in text


_W3, _DOWN = "model.layers.1.block_sparse_moe.experts.2.w3.weight", "model.layers.0.mlp.experts.down_proj"
DAMAGE = {
    "weight": ("mixtral-even", lambda t: t.pop(_W3), "1 of the 8 tensors that make up"),
    "scale": ("mixtral-even", lambda t: t.pop(f"{_W3}_scale"), "w3.weight_scale is missing"),
    "global scale": ("gpt-oss", lambda t: t.pop(f"{_DOWN}_global_scale"), "down_proj_global_scale is missing"),
    "experts": ("gpt-oss", lambda t: t.update({_DOWN: torch.zeros(3, 64, 24, dtype=torch.uint8)}), r"U8 \[3, 64"),
}


@pytest.mark.parametrize(("kind", "change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoints_are_refused(kind, change, message, quantized, tmp_path):
    q = quantized(kind, "nvfp4")
    tensors = dict(q.tensors)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        mxquant.load(with_tensors(q.path, tmp_path / "bad", tensors))


def test_parts_of_an_expert_with_different_global_scales_do_not_load(quantized, tmp_path):
    q = quantized("mixtral-even", "nvfp4")
    tensors = dict(q.tensors)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight_global_scale"
    assert tensors[name] == tensors[name.replace("w1", "w3")]
    tensors[name] = 2 * tensors[name]
    with pytest.raises((RuntimeError, CheckpointError)):
        mxquant.load(with_tensors(q.path, tmp_path / "bad", tensors))


# --- other formats --------------------------------------------------------------------------------


def test_mxfp4_experts_are_read_by_transformers_alone_and_nvfp4_are_not_given_to_it(quantized):
    q = quantized("mixtral-even", "e8m0/32")
    if transformers.__version__.startswith("5.17."):  # it does not cast what it renames, and this source is fp32
        assert q.report.plan.on_disk == "mxquant"
        assert "leave model.layers.0.mlp.gate.weight" in q.report.plan.on_disk_reason
        return
    assert q.report.plan.on_disk == "compressed-tensors"
    ignored = json.loads((q.path / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.block_sparse_moe.gate" in ignored
    plan = quantized("mixtral-even", "nvfp4").report.plan
    assert plan.on_disk == "mxquant"
    assert "global scales of experts" in plan.on_disk_reason


@pytest.fixture
def gpt_oss_mxfp4(make_checkpoint, tmp_path):
    """A checkpoint as gpt-oss is published, and what transformers' own code decodes it to."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, generator = make_checkpoint("gpt-oss", "bfloat16"), torch.Generator().manual_seed(0)
    packed, dense = {}, {}
    config = json.loads((source / "config.json").read_text()) | {"intermediate_size": 64}
    for name, t in tensors_of(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            wide = (4, 128) if name.endswith("gate_up_proj_bias") else t.shape
            packed[name] = dense[name] = torch.randn(wide, generator=generator).bfloat16()
            continue
        rows = 128 if "gate_up" in name else 64
        blocks = torch.randint(0, 256, (4, rows, 2, 16), generator=generator).byte()
        scales = torch.randint(115, 125, (4, rows, 2), generator=generator).byte()
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        dense[name] = convert_moe_packed_tensors(blocks, scales)
    folders = with_tensors(source, tmp_path / "mxfp4", packed), with_tensors(source, tmp_path / "decoded", dense)
    for folder, method in zip(folders, ({"quantization_config": {"quant_method": "mxfp4"}}, {}), strict=True):
        (folder / "config.json").write_text(json.dumps(config | method))
    return folders


@pytest.mark.parametrize("text", ["ue5m3/16", "mxfp4"])
def test_gpt_oss_as_published_is_a_source(text, gpt_oss_mxfp4, tmp_path):
    published, dense = gpt_oss_mxfp4
    for name, source in (("a", published), ("b", dense)):
        mxquant.quantize_model(source, tmp_path / name, text)
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(same(t, b[name]) for name, t in a.items())
    assert "mxfp4" not in json.loads((tmp_path / "a/config.json").read_text())["quantization_config"].values()
    model = mxquant.load(tmp_path / "a")
    if text == "mxfp4":  # the same format again: nothing is lost
        mxquant.dequantize_model(tmp_path / "a", tmp_path / "d")
        found, expected = tensors_of(tmp_path / "d"), tensors_of(dense)
        experts = [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]
        assert len(experts) == 4
        assert all(torch.equal(found[name], expected[name]) for name in experts)
    assert logits(model).isfinite().all()


def test_gpt_oss_blocks_without_scales_are_named(gpt_oss_mxfp4, tmp_path):
    tensors = tensors_of(gpt_oss_mxfp4[0])
    lost = {k: t for k, t in tensors.items() if k != "model.layers.1.mlp.experts.down_proj_scales"}
    broken = tensors | {"model.layers.1.mlp.experts.down_proj_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)}
    for number, (changed, message) in enumerate(((lost, "has no down_proj_scales"), (broken, "is not MXFP4"))):
        source = with_tensors(gpt_oss_mxfp4[0], tmp_path / str(number), changed)
        with pytest.raises(CheckpointError, match=message):
            mxquant.quantize_model(source, tmp_path / "q", "ue5m3/16")
