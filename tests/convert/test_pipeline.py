"""From a checkpoint to a quantized one: bytes, names, side files, and nothing lost when it goes wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError, PlanError, WeightError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

UE5M3 = QuantScheme(scale="ue5m3", block=16, scale_rule="absmax")
ARCHITECTURES = ["llama", "llama-tied", "qwen2", "gemma3", "gpt2"]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def _fingerprint(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    "scheme",
    [UE5M3, QuantScheme(scale="e4m3", block=(8, 8), global_scale=True), QuantScheme.preset("mxfp8")],
    ids=lambda s: s.name,
)
def test_every_tensor_is_the_quantized_source_or_the_source_itself(kind, scheme, make_checkpoint, tmp_path):
    source = make_checkpoint(kind, "bfloat16")
    mxquant.quantize_model(source, tmp_path / "out", scheme)
    before, after = _tensors(source), _tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    listed = {m.removesuffix(".weight_scale") for m in after if m.endswith(".weight_scale")}
    assert len(listed) == (8 if kind == "gpt2" else 14)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module not in listed:
            assert _same_bytes(after[name], weight), name
            continue
        matrix = weight.t() if kind == "gpt2" else weight
        q = mxquant.quantize(matrix, scheme, name=name, global_scale=after.get(f"{module}.weight_global_scale"))
        assert after[name].shape != weight.shape
        assert _same_bytes(after[name], q.packed), name
        assert _same_bytes(after[f"{module}.weight_scale"], q.scale), name
    extra = {f"{m}.weight_scale" for m in listed} | {f"{m}.weight_global_scale" for m in listed if scheme.global_scale}
    assert set(after) == set(before) | extra
    assert config["quant_method"] == "mxquant"
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"marker": "carried along"}'


def test_embeddings_head_norms_and_biases_stay_dense(make_checkpoint, tmp_path):
    report = mxquant.quantize_model(make_checkpoint("qwen2"), tmp_path / "out", UE5M3)
    assert {t.kind for t in report.plan.quantized} == {"linear"}
    assert {t.kind for t in report.plan.dense} == {"embedding", "output head", "norm", "bias"}


def test_an_included_head_is_quantized_and_a_tied_one_never(make_checkpoint, tmp_path):
    recipe = QuantRecipe(default=UE5M3, include=("lm_head", "layers"))
    report = mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "a", recipe)
    assert "lm_head.weight" in {t.name for t in report.plan.quantized}
    with pytest.raises(PlanError, match="lm_head"):
        mxquant.quantize_model(
            make_checkpoint("llama-tied"), tmp_path / "b", QuantRecipe(default=UE5M3, include=("lm_head",))
        )


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_weight_that_is_stored_twice_is_written_once_if_it_is_the_same(same, make_checkpoint, tmp_path):
    shutil.copytree(make_checkpoint("llama-tied"), tmp_path / "source")
    tensors = _tensors(tmp_path / "source")
    embedding = next(name for name in tensors if "embed_tokens" in name)
    tensors["lm_head.weight"] = tensors[embedding].clone() + (0 if same else 1)
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    report = mxquant.quantize_model(tmp_path / "source", tmp_path / "out", UE5M3)
    assert ("lm_head.weight" in _tensors(tmp_path / "out")) == (not same)
    assert report.plan.tied == ({"lm_head.weight": embedding} if same else {})


def test_fused_projections_share_the_global_scale_of_their_largest_weight(make_checkpoint, tmp_path):
    source = make_checkpoint("llama-even")
    mxquant.quantize_model(source, tmp_path / "out", QuantScheme.preset("nvfp4"))
    before, after = _tensors(source), _tensors(tmp_path / "out")
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        names = [f"model.layers.1.{p}" for p in parts]
        scales = {float(after[f"{n}.weight_global_scale"]) for n in names}
        amax = max(before[f"{n}.weight"].abs().max() for n in names)
        assert scales == {float(amax.reciprocal() * 2688)}
    assert after["model.layers.1.self_attn.o_proj.weight_global_scale"] not in scales


def test_the_bytes_do_not_depend_on_how_source_or_output_are_sharded(make_checkpoint, tmp_path):
    scheme = QuantScheme(scale="ue5m3", block=16, rounding="stochastic")
    one = make_checkpoint("llama", "bfloat16")
    many = make_checkpoint("llama", "bfloat16", "20KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    mxquant.quantize_model(one, tmp_path / "a", scheme, seed=7)
    mxquant.quantize_model(many, tmp_path / "b", scheme, seed=7, max_shard_bytes=9000)
    a, b = _tensors(tmp_path / "a"), _tensors(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(_same_bytes(a[n], b[n]) for n in a)
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in (tmp_path / "b").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 9000
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "b" / file, "pt") as handle:
            assert name in handle.keys()  # noqa: SIM118
    mxquant.quantize_model(one, tmp_path / "c", scheme, seed=8)
    assert not all(_same_bytes(a[n], t) for n, t in _tensors(tmp_path / "c").items())


def test_report_figures_are_those_of_the_decoded_weights(make_checkpoint, tmp_path):
    source = make_checkpoint("llama", "bfloat16")
    report = mxquant.quantize_model(source, tmp_path / "out", UE5M3)
    saved = json.loads((tmp_path / "out/quantization_report.json").read_text())
    before = _tensors(source)
    error = signal = nbytes = count = 0.0
    for t in report.plan.quantized:
        w = before[t.name].double()
        q = mxquant.quantize(before[t.name], UE5M3)
        error += float((q.dequantize().double() - w).square().sum())
        signal += float(w.square().sum())
        nbytes += q.nbytes
        count += w.numel()
    assert saved["relative_error"] == pytest.approx((error / signal) ** 0.5, rel=1e-5)
    assert saved["bits_per_weight"] == pytest.approx(8 * nbytes / count)
    assert saved["bytes_after"] == sum(t.nbytes for t in _tensors(tmp_path / "out").values())
    assert saved["bytes_before"] == sum(t.nbytes for t in before.values())
    assert sum(row["parameters"] for row in saved["groups"] + saved["dense"]) == saved["parameters"]


def test_recipe_rules_give_each_layer_its_own_scheme(make_checkpoint, tmp_path):
    recipe = QuantRecipe.from_dict(
        {"rules": [{"q_proj|k_proj": "mxfp8"}, {r"layers\.0\.mlp": "dense"}], "default": {"scale": "ue5m3", "block": 8}}
    )
    report = mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "out", recipe)
    names = {t.module: t.scheme.name if t.scheme else "dense" for t in report.plan.tensors}
    assert names["model.layers.0.self_attn.q_proj"] == "mxfp8"
    assert names["model.layers.0.mlp.up_proj"] == "dense"
    assert names["model.layers.1.mlp.up_proj"] == QuantScheme(scale="ue5m3", block=8).name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("preset", [UE5M3, QuantScheme.preset("nvfp4"), "mxfp4"], ids=str)
def test_dequantized_checkpoint_is_the_decoded_weights_in_the_source_layout(kind, preset, make_checkpoint, tmp_path):
    source = make_checkpoint(kind)
    mxquant.quantize_model(source, tmp_path / "q", preset)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    before, packed, dense = _tensors(source), _tensors(tmp_path / "q"), _tensors(tmp_path / "d")
    assert {n: (t.shape, t.dtype) for n, t in dense.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    assert "quantization_config" not in json.loads((tmp_path / "d/config.json").read_text())
    scheme = preset if isinstance(preset, QuantScheme) else QuantScheme.preset(preset)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in packed:
            assert _same_bytes(dense[name], weight)
            continue
        matrix = weight.t() if kind == "gpt2" else weight
        q = mxquant.quantize(matrix, scheme, global_scale=packed.get(f"{module}.weight_global_scale"))
        decoded = q.dequantize().t() if kind == "gpt2" else q.dequantize()
        assert _same_bytes(dense[name], decoded.contiguous()), name


def test_stored_as_compressed_tensors_only_where_that_format_can_hold_it(make_checkpoint, tmp_path):
    cases = {("llama-even", "nvfp4"): "compressed-tensors", ("llama", "nvfp4"): "mxquant", ("gpt2", "mxfp4"): "mxquant"}
    cases["llama-even", "mxfp4"] = "compressed-tensors"
    for number, ((kind, preset), expected) in enumerate(cases.items()):
        report = mxquant.quantize_model(make_checkpoint(kind), tmp_path / str(number), preset)
        config = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == report.plan.on_disk == expected


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    # 3 matrices of 67 M parameters each, 403 MB in bf16: far more than the work may hold at once.
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=16384, num_hidden_layers=1, vocab_size=32, num_attention_heads=32
    )
    source = tmp_path / "big"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(source)
    rows = torch.randn(1, 1 << 16).bfloat16()
    shapes = {f"self_attn.{p}_proj": (4096, 4096) for p in "qkvo"}
    shapes |= {"mlp.gate_proj": (16384, 4096), "mlp.up_proj": (16384, 4096), "mlp.down_proj": (4096, 16384)}
    tensors = {
        f"model.layers.0.{n}.weight": rows.expand(r * c >> 16, -1).reshape(r, c).clone() for n, (r, c) in shapes.items()
    }
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{n}.weight": torch.ones(4096).bfloat16() for n in norms}
    tensors |= {n: torch.zeros(32, 4096).bfloat16() for n in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    del tensors
    script = (
        "import sys, mxquant; s = mxquant.QuantScheme(scale='ue5m3', scale_rule='absmax')\n"
        "r = mxquant.quantize_model(sys.argv[1], sys.argv[2], s); print(r.peak_bytes - r.base_bytes)"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert grown < 150e6


class TestFailuresLeaveNothingBehind:
    @pytest.fixture
    def source(self, make_checkpoint, tmp_path):
        folder = tmp_path / "source"
        shutil.copytree(make_checkpoint("llama", "bfloat16", "20KB"), folder)
        return folder

    def _fails(self, source, out, match, kind=CheckpointError, scheme=UE5M3, **options):
        before = _fingerprint(source)
        with pytest.raises(kind, match=match) as caught:
            mxquant.quantize_model(source, out, scheme, **options)
        assert _fingerprint(source) == before
        assert not list(out.parent.glob("*.partial"))
        assert len(str(caught.value).splitlines()) == 1

    def test_output_is_the_source(self, source):
        self._fails(source, source, "same folder", overwrite=True)

    def test_output_inside_the_source(self, source):
        self._fails(source, source / "out", "lie in one another")

    def test_output_not_empty(self, source, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "notes.txt").write_text("precious")
        self._fails(source, out, "not empty")
        self._fails(source, out, "holds no model", overwrite=True)
        assert (out / "notes.txt").read_text() == "precious"

    def test_truncated_shard(self, source, tmp_path):
        shard = sorted(source.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-10])
        self._fails(source, tmp_path / "out", shard.name)

    def test_missing_shard(self, source, tmp_path):
        shard = sorted(source.glob("*.safetensors"))[1]
        shard.unlink()
        self._fails(source, tmp_path / "out", shard.name)

    def test_missing_tensor(self, source, tmp_path):
        shard = sorted(source.glob("*.safetensors"))[1]
        tensors = load_file(shard)
        lost = next(n for n in tensors if n.endswith("_proj.weight"))
        save_file({n: t for n, t in tensors.items() if n != lost}, shard, metadata={"format": "pt"})
        self._fails(source, tmp_path / "out", lost)

    def test_unknown_architecture(self, source, tmp_path):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
        self._fails(source, tmp_path / "out", "no-such-model")

    def test_already_quantized(self, source, tmp_path):
        mxquant.quantize_model(source, tmp_path / "once", UE5M3)
        self._fails(tmp_path / "once", tmp_path / "twice", "already quantized")
        assert not (tmp_path / "twice").exists()

    def test_nan_is_named_with_its_place(self, source, tmp_path):
        name = "model.layers.1.mlp.up_proj.weight"
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        tensors = load_file(source / index[name])
        tensors[name][5, 3] = torch.nan
        save_file(tensors, source / index[name], metadata={"format": "pt"})
        for scheme in (UE5M3, QuantScheme.preset("nvfp4")):
            self._fails(source, tmp_path / "out", rf"{name}: nan at row 5, column 3", WeightError, scheme)
        assert not (tmp_path / "out").exists()

    def test_full_disk_before_work(self, source, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        self._fails(source, tmp_path / "out", "GB are free")

    def test_full_disk_during_work_keeps_the_old_output(self, source, tmp_path, monkeypatch):
        from mxquant.checkpoint.writer import ShardWriter

        out = tmp_path / "out"
        mxquant.quantize_model(source, out, UE5M3)
        old = _fingerprint(out)
        original, calls = ShardWriter.write, []

        def write(self, *args):
            calls.append(1)
            if len(calls) > 20:
                raise OSError(28, "No space left on device")
            return original(self, *args)

        monkeypatch.setattr(ShardWriter, "write", write)
        self._fails(source, out, "No space left", overwrite=True)
        assert _fingerprint(out) == old


def test_overwrite_replaces_the_whole_output(make_checkpoint, tmp_path):
    out = tmp_path / "out"
    mxquant.quantize_model(make_checkpoint("llama"), out, UE5M3, max_shard_bytes=9000)
    mxquant.quantize_model(make_checkpoint("llama"), out, "mxfp4", overwrite=True)
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "fresh", "mxfp4")
    assert _fingerprint(out) == _fingerprint(tmp_path / "fresh")


def test_all_problems_of_a_plan_are_told_at_once(make_checkpoint, tmp_path):
    recipe = QuantRecipe(default=UE5M3, exclude=("no_such_layer",), rules=())
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError) as caught:
        mxquant.quantize_model(source, tmp_path / "out", recipe)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    for part in ("no_such_layer", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"):
        assert part in text


def test_layers_left_dense_by_accident_are_an_error(make_checkpoint, tmp_path):
    source = make_checkpoint("jetmoe")  # its experts follow no interface
    with pytest.raises(PlanError, match="would stay dense"):
        mxquant.quantize_model(source, tmp_path / "a", UE5M3)
    report = mxquant.quantize_model(source, tmp_path / "b", UE5M3, allow_dense=True)
    assert report.plan.dense


def test_linear_layers_that_the_model_keeps_in_fp32_stay_dense_unless_named(make_checkpoint, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["o_proj"])
    for include, count in (((), 0), (("o_proj", "mlp"), 2)):
        _, plan = plan_model(make_checkpoint("llama"), QuantRecipe(default=UE5M3, include=include))
        kept = [t for t in plan.tensors if "o_proj" in t.name]
        assert {t.kind for t in kept} == {"linear kept in fp32"}
        assert sum(t.scheme is not None for t in kept) == count
        assert {t.reason for t in kept} == {"included by 'o_proj'" if include else "kept in fp32 by the model"}


def test_narrow_weights_are_warned_of_with_the_share_of_small_scales(make_checkpoint, tmp_path):
    source = tmp_path / "narrow"
    shutil.copytree(make_checkpoint("llama"), source)
    tensors = {n: t * 0.05 if t.ndim == 2 else t for n, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    e4m3 = QuantScheme(scale="e4m3", block=16, scale_rule="absmax")
    report = mxquant.quantize_model(source, tmp_path / "a", e4m3)
    share = (report.total.zero_scales + report.total.subnormal_scales) / report.total.blocks
    assert share > 0.9
    assert len(report.plan.warnings) == 1
    assert f"{share:.0%}" in report.plan.warnings[0]
    assert "ue5m3" in report.plan.warnings[0]
    assert not mxquant.quantize_model(source, tmp_path / "b", UE5M3).plan.warnings
