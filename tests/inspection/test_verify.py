"""``mxquant verify``: every planted fault is found and named, and what is right passes."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.cli.main import main
from mxquant.inspection.against_source import sample
from mxquant.inspection.faults import KINDS
from mxquant.inspection.lint import lint
from mxquant.inspection.verify import verify_checkpoint
from mxquant.schemes.formats import QuantScheme

E4M3 = torch.float8_e4m3fn
Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))
K0 = "model.layers.0.self_attn.k_proj"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1"
INDEX, REPORT = "model.safetensors.index.json", "quantization_report.json"


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


MIXTURES = ("mixtral", "qwen3-moe", "deepseek-v3", "llama4", "gpt-oss", "granite-moe")

# Whatever the tool writes, it passes, with every layer compared and quantized again.

RECIPES = {
    "default": ("llama", "ue5m3/16"),
    "lost blocks": ("llama", "e4m3/8/absmax"),
    "global scale": ("llama", "e4m3+global/16"),
    "four-over-six": ("llama", "e4m3+global/16/four-over-six"),
    "tiles": ("llama", "ue5m3/32x32"),
    "bytes": ("llama", "mxfp8"),
    "six bits": ("llama", "mxfp6"),
    "floats": ("llama", "bf16/16"),
    "stochastic": ("llama", "ue5m3/16/stochastic"),
    "compressed-tensors nvfp4": ("llama-even", "nvfp4"),
    "compressed-tensors mxfp4": ("llama-even", "mxfp4"),
    "tied": ("llama-tied", "nvfp4"),
    "transposed": ("gpt2", "ue5m3/16"),
    "biases": ("qwen2", "ue5m3/16"),
    "gemma": ("gemma3", "e4m3+global/16"),
    **{f"{kind} {text}": (kind, text) for kind in MIXTURES for text in ("ue5m3/16", "nvfp4")},
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_output_passes(name, make_checkpoint, tmp_path):
    kind, text = RECIPES[name]
    source = make_checkpoint(kind, "bfloat16" if "compressed" in name else "float32")
    report = mxquant.quantize_model(source, tmp_path / "q", QuantScheme.parse(text), seed=3)
    found = verify_checkpoint(tmp_path / "q", source, samples=None)
    assert not found.faults
    assert found.exit_code == 0
    compared = found.checked["packed weights compared with the source"]
    assert compared == found.checked["of them quantized again"] == len(report.plan.quantized) > 0
    assert found.checked["dense tensors equal to the source"] == len(report.plan.dense) > 0
    worst = max(stats.relative_error for stats in report.stats.values())
    assert found.checked["largest relative error"] == pytest.approx(worst, rel=1e-3)
    assert not [w for w in found.warnings if "not compared" in w]


def test_recipes_shards_and_dynamic_parts_pass(make_checkpoint, tmp_path):
    recipe = mxquant.QuantRecipe.from_dict(
        {
            "rules": [{"q_proj": "mxfp8"}, {"o_proj": "dense"}, {r"layers\.1\.mlp": "e4m3+global/8"}],
            "default": "ue5m3/16", "activations": "same", "kv_cache": "ue5m3/16",
        }
    )  # fmt: skip
    source = make_checkpoint("llama")
    mxquant.quantize_model(source, tmp_path / "q", recipe, max_shard_bytes=20_000)
    found = verify_checkpoint(tmp_path / "q", source, samples=None)
    assert not found.faults
    assert found.checked["files"] > 2
    assert found.checked["of them quantized again"] == 12


def test_without_a_report_schemes_are_those_of_the_config(make_checkpoint, tmp_path):
    source = make_checkpoint("llama")
    for name, text, again in [("a", "ue5m3/16", 14), ("b", "ue5m3/16/stochastic", 0)]:
        mxquant.quantize_model(source, tmp_path / name, QuantScheme.parse(text))
        (tmp_path / name / "quantization_report.json").unlink()
        found = verify_checkpoint(tmp_path / name, source, samples=None)
        assert not found.faults
        assert found.checked["of them quantized again"] == again  # random bits need a seed


def test_a_dense_checkpoint_passes_and_may_be_compared(make_checkpoint, tmp_path):
    source = make_checkpoint("llama-tied", max_shard_size="20KB")
    found = verify_checkpoint(source, source)
    assert not found.faults
    assert found.checked["packed weights"] == 0
    assert found.checked["tied weights"] == 1


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A tiny random gpt-oss, dense and in its own MXFP4 format."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    dense, packed = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("packed")
    GptOssForCausalLM(GptOssConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(dense)
    found = load_file(dense / "model.safetensors")
    for name in [n for n in found if n.endswith(("gate_up_proj", "down_proj"))]:
        q = [mxquant.quantize(matrix.t(), QuantScheme.preset("mxfp4")) for matrix in found.pop(name)]
        found[f"{name}_blocks"] = torch.stack([x.packed.unflatten(1, (-1, 16)) for x in q])
        found[f"{name}_scales"] = torch.stack([x.scale for x in q])
    save_file(found, packed / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((dense / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(data))
    return dense, packed


def test_gpt_oss_in_its_own_format_passes_and_can_be_the_source(gpt_oss, tmp_path):
    dense, packed = gpt_oss
    found = verify_checkpoint(packed, dense, samples=None)
    assert not found.faults
    assert found.checked["packed weights compared with the source"] == 4
    assert 0.05 < found.checked["largest relative error"] < 0.15
    mxquant.quantize_model(packed, tmp_path / "q", "ue5m3/16")
    again = verify_checkpoint(tmp_path / "q", packed, samples=None)
    assert not again.faults
    assert again.checked["of them quantized again"] == 12


def test_the_experts_of_another_layer_are_no_match(gpt_oss, tmp_path):
    dense, packed = gpt_oss
    shutil.copytree(packed, tmp_path / "broken")
    up = "model.layers.{}.mlp.experts.gate_up_proj_blocks"

    def swap(t):
        t[up.format(0)], t[up.format(1)] = t[up.format(1)], t[up.format(0)]

    tensors(swap)(tmp_path / "broken")
    assert not verify_checkpoint(tmp_path / "broken").faults
    check(verify_checkpoint(tmp_path / "broken", dense), "weights", "another weight")


# Planted faults. Each edits a copy of a checkpoint and says which kind it must be, and what the message names.


@pytest.fixture(scope="module")
def models(make_checkpoint, tmp_path_factory):
    """Checkpoints to break, and the sources of those that are compared."""
    folder = tmp_path_factory.mktemp("models")
    sources = {
        "nvfp4": make_checkpoint("llama-even", "bfloat16"),
        "mxfp4": make_checkpoint("llama-even", "bfloat16"),
        "native": make_checkpoint("llama"),
        "mxfp8": make_checkpoint("llama"),
        "shards": make_checkpoint("llama"),
        "tied": make_checkpoint("llama-tied"),
        "experts": make_checkpoint("mixtral"),
    }
    text = {"native": "e4m3+global/16", "shards": "ue5m3/16", "tied": "ue5m3/16", "experts": "e4m3+global/16"}
    for name, source in sources.items():
        limit = 20_000 if name == "shards" else 10**9
        scheme = QuantScheme.parse(text.get(name, name))
        mxquant.quantize_model(source, folder / name, scheme, max_shard_bytes=limit)
    return folder, sources


def tensors(edit):
    """A fault in the tensors of a checkpoint with one file."""

    def plant(folder: Path):
        file = folder / "model.safetensors"
        found = load_file(file)
        edit(found)
        save_file({k: v.contiguous() for k, v in found.items()}, file, metadata={"format": "pt"})

    return plant


def edit_json(name, edit):
    def plant(folder: Path):
        data = json.loads((folder / name).read_text())
        edit(data)
        (folder / name).write_text(json.dumps(data))

    return plant


def config(edit):
    return edit_json("config.json", lambda data: edit(data["quantization_config"]))


def put(name, index, value):
    """One byte, or number, of one tensor."""

    def edit(t):
        target = t[name].view(torch.uint8) if t[name].dtype == E4M3 else t[name]
        target[index] = value

    return tensors(edit)


def change(part, made_from):
    return tensors(lambda t: t.update({f"{Q0}.{part}": made_from(t[f"{Q0}.{part}"])}))


def lose(part):
    return tensors(lambda t: t.pop(f"{Q0}.{part}"))


def lose_a_layer(t):
    for name in [n for n in t if n.startswith(Q0)]:
        del t[name]


def lose_a_kind(t):
    for name in [n for n in t if "down_proj" in n]:
        del t[name]


def shorten_the_norm(t):
    t["model.norm.weight"] = torch.ones(63)


def store_twice(t):
    t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()


def next_scale(t):
    t[f"{Q0}.weight_scale"][0, 0] += 1


def forget_quantization(data):
    del data["quantization_config"]


def ask_for_fp16(data):
    data["dtype"] = "float16"


def rename(old, new):
    return tensors(lambda t: t.update({new: t.pop(old)}))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def lose_a_shard(folder):
    sorted(folder.glob("model-*"))[1].unlink()


def damage_a_header(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = struct.pack("<Q", 10**15)
    file.write_bytes(data)


def repeat_a_tensor(folder):
    first, *_, last = sorted(folder.glob("model-*"))
    other, more = load_file(first), load_file(last)
    name = next(iter(other))
    save_file({**more, name: other[name]}, last, metadata={"format": "pt"})


def forget_in_the_index(data):
    del data["weight_map"][f"{Q1}.weight"]


def misplace_in_the_index(data):
    files = sorted(set(data["weight_map"].values()))
    data["weight_map"]["model.norm.weight"] = next(f for f in files if f != data["weight_map"]["model.norm.weight"])


def make_dense(t):
    t.pop(f"{Q0}.weight_scale"), t.pop(f"{Q0}.weight_global_scale")
    shape = t.pop(f"{Q0}.weight_packed").shape
    t[f"{Q0}.weight"] = torch.zeros(shape[0], shape[1] * 2)


def swap_layers(t):
    for end in ("packed", "scale"):
        a, b = f"{Q0}.weight_{end}", f"{Q1}.weight_{end}"
        t[a], t[b] = t[b], t[a]


def zero_where_wrong(t):
    t[f"{Q0}.weight_packed"][0, 0] = 0x07
    t[f"{Q0}.weight_scale"].view(torch.uint8)[0, 0] = 0


def nudge_the_group(t):
    for p in "qkv":
        t[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"] *= 1.0001


def wrong_report(data):
    next(t for t in data["tensors"] if t["name"] == f"{Q0}.weight")["relative_error"] *= 1.1


def drop_from_config(data):
    data["modules"] = data["modules"][1:]


def first_codes(t):
    t[f"{Q0}.weight_packed"][0, 3] ^= 0x01


# name -> (checkpoint, how, kind, what the message must name)
FAULTS = {
    "a file cut short": ("nvfp4", truncate, "files", "7 bytes too short"),
    "a damaged header": ("nvfp4", damage_a_header, "files", "model.safetensors"),
    "a shard that is lost": ("shards", lose_a_shard, "files", "model-00002"),
    "a tensor in two shards": ("shards", repeat_a_tensor, "files", "again in"),
    "a tensor that the index forgot": ("shards", edit_json(INDEX, forget_in_the_index), "files", Q1),
    "a tensor that the index misplaces": ("shards", edit_json(INDEX, misplace_in_the_index), "files", "norm"),
    "no config": ("nvfp4", lambda f: (f / "config.json").unlink(), "files", "config.json"),
    "a layer that the config forgot": ("native", config(drop_from_config), "config", "down_proj.weight"),
    "a layer that the files lost": ("native", tensors(lose_a_layer), "config", f"fills {Q0}.weight"),
    "all layers of a kind lost": ("native", tensors(lose_a_kind), "config", "lists model.layers.*.mlp.down_proj"),
    "a packed layer among those ignored": ("nvfp4", config(lambda q: q["ignore"].append(Q0)), "config", Q0),
    "a dense layer that is not ignored": ("nvfp4", tensors(make_dense), "config", Q0),
    "a scale that is lost": ("nvfp4", lose("weight_scale"), "config", f"{Q0}.weight_scale is missing"),
    "a packed tensor that is lost": ("mxfp4", lose("weight_packed"), "config", f"{Q0}.weight_scale"),
    "a scale for a layer that is none": ("native", rename(f"{Q0}.weight_scale", "x.weight_scale"), "config", "x."),
    "a norm that is lost": ("native", tensors(lambda t: t.pop("model.norm.weight")), "config", "model.norm"),
    "no word of quantization": ("nvfp4", edit_json("config.json", forget_quantization), "config", Q0),
    "a newer format": ("native", config(lambda q: q.update(format_version=99)), "config", "99"),
    "scales of another shape": ("nvfp4", change("weight_scale", lambda t: t[:, :-1]), "shapes", f"{Q0}.weight_scale"),
    "scales of another dtype": ("nvfp4", change("weight_scale", torch.Tensor.float), "shapes", "F32"),
    "a norm of another shape": ("native", tensors(shorten_the_norm), "shapes", "[63]"),
    "a NaN scale": ("nvfp4", put(f"{Q0}.weight_scale", (3, 1), 0x7F), "scales", Q0),
    "a negative scale": ("nvfp4", put(f"{Q0}.weight_scale", (3, 1), 0xC0), "scales", Q0),
    "a NaN power of two": ("mxfp4", put(f"{Q0}.weight_scale", (3, 1), 0xFF), "scales", Q0),
    "a power of two that overflows": ("mxfp4", put(f"{Q0}.weight_scale", (3, 1), 0xFE), "scales", "fp32"),
    "a zero scale where elements are not": ("nvfp4", tensors(zero_where_wrong), "scales", "zero where"),
    "an infinite global scale": ("nvfp4", put(f"{Q0}.weight_global_scale", 0, float("inf")), "scales", "inf"),
    "a zero global scale of an expert": ("experts", put(f"{EXPERT}.weight_global_scale", 0, 0.0), "scales", EXPERT),
    "a NaN element": ("mxfp8", put(f"{Q0}.weight", 5, 0x7F), "values", Q0),
    "a NaN in a norm": ("native", put("model.norm.weight", 5, float("nan")), "values", "model.norm"),
    "fused projections that differ": ("nvfp4", put(f"{K0}.weight_global_scale", 0, 1000.0), "groups", "k_proj 1000"),
    "a dtype that its products do not have": ("nvfp4", edit_json("config.json", ask_for_fp16), "load", "same dtype"),
    "a head stored beside its twin": ("tied", tensors(store_twice), "tied", "second time"),
}
# Those that only a comparison with the source can find.
FAULTS_AGAINST_THE_SOURCE = {
    "a byte of the embedding": ("native", put("model.embed_tokens.weight", (7, 3), 0.5), "dense", "embed_tokens"),
    "a tensor from nowhere": ("native", tensors(lambda t: t.update({"extra": torch.ones(3)})), "dense", "extra"),
    "an element": ("nvfp4", tensors(first_codes), "weights", "1 bytes of its elements"),
    "an element of an expert": ("experts", put(f"{EXPERT}.weight", (0, 0), 0x77), "weights", EXPERT),
    "a scale one code off": ("mxfp4", tensors(next_scale), "weights", "1 bytes of its block scales"),
    "a group's global scale": ("nvfp4", tensors(nudge_the_group), "weights", "the source asks for"),
    "two layers swapped": ("mxfp4", tensors(swap_layers), "weights", Q1),
    "an error that the report got wrong": ("native", edit_json(REPORT, wrong_report), "weights", "the report says"),
}


def test_there_are_enough_faults_of_every_kind():
    every = FAULTS | FAULTS_AGAINST_THE_SOURCE
    assert len(every) == len(FAULTS) + len(FAULTS_AGAINST_THE_SOURCE) >= 20
    assert {kind for _, _, kind, _ in every.values()} == set(KINDS)


def check(found, kind, names):
    assert found.exit_code == KINDS[kind].code, found.faults
    assert any(f.kind == kind and names in f.message for f in found.faults), found.faults


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name, models, tmp_path):
    made, plant, kind, names = FAULTS[name]
    shutil.copytree(models[0] / made, tmp_path / "broken")
    plant(tmp_path / "broken")
    check(verify_checkpoint(tmp_path / "broken"), kind, names)


@pytest.mark.parametrize("name", FAULTS_AGAINST_THE_SOURCE)
def test_a_planted_fault_is_found_by_comparison_with_the_source(name, models, tmp_path):
    made, plant, kind, names = FAULTS_AGAINST_THE_SOURCE[name]
    folder, sources = models
    shutil.copytree(folder / made, tmp_path / "broken")
    plant(tmp_path / "broken")
    assert not verify_checkpoint(tmp_path / "broken").faults
    check(verify_checkpoint(tmp_path / "broken", sources[made], samples=None), kind, names)


def test_codes_in_the_padding_are_found(tmp_path):
    scheme = QuantScheme.parse("ue5m3/16")
    q = mxquant.quantize(torch.randn(4, 37), scheme)
    for name, byte in [("right", 0x00), ("wrong", 0x10)]:
        packed = q.packed.clone()
        packed[2, -1] |= byte
        folder = tmp_path / name
        folder.mkdir()
        modules = [{"names": ["a"], "scheme": "s", "shape": [4, 37], "transposed": False}]
        quantization = {"quant_method": "mxquant", "format_version": 1, "modules": modules}
        quantization["schemes"] = {"s": scheme.to_dict()}
        (folder / "config.json").write_text(json.dumps({"model_type": "none", "quantization_config": quantization}))
        save_file({"a.weight": packed, "a.weight_scale": q.scale}, folder / "model.safetensors")
        found = verify_checkpoint(folder)
        assert [f.kind for f in found.faults] == (["values"] if byte else [])
        assert any("not compared with the model's class" in w for w in found.warnings)


def test_the_command_says_what_it_found_and_exits_with_the_kind(models, tmp_path):
    folder, sources = models
    right = run("verify", folder / "nvfp4", "--source", sources["nvfp4"], "--all")
    assert right.exit_code == 0
    assert "no faults" in right.stdout
    shutil.copytree(folder / "nvfp4", tmp_path / "broken")
    put(f"{Q0}.weight_scale", (3, 1), 0x7F)(tmp_path / "broken")
    put("model.norm.weight", 5, float("nan"))(tmp_path / "broken")
    wrong = run("verify", tmp_path / "broken")
    assert wrong.exit_code == 13
    assert "FAULT scales" in wrong.stdout
    assert "FAULT values" in wrong.stdout
    data = json.loads(run("verify", tmp_path / "broken", "--json").stdout)
    assert (data["ok"], data["exit_code"]) == (False, 13)
    assert [f["kind"] for f in data["faults"]] == ["scales", "values"]
    for kind, (code, _) in KINDS.items():
        assert f"{code}  {kind}: " in run("verify", "--help").stdout


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (("./nowhere",), "no such folder", 1),
        (("MODEL", "--source", "./nowhere"), "no such folder", 1),
        (("MODEL", "--source", "MODEL"), "quantized itself", 1),
        (("MODEL", "--all"), "--source", 2),
        (("FOREIGN",), "gptq", 1),
    ],
)
def test_a_wrong_request_gives_one_line(args, message, code, models, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    save_file({"a.qweight": torch.zeros(4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    places = {"MODEL": models[0] / "nvfp4", "FOREIGN": tmp_path}
    result = run("verify", *(places.get(a, a) for a in args))
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_samples_are_spread_evenly():
    assert sample(range(10), 3) == [1, 5, 8]
    assert sample(range(10), None) == sample(range(10), 10) == list(range(10))
    for total in range(1, 40):
        for count in range(1, total + 1):
            chosen = sample(range(total), count)
            assert len(set(chosen)) == count
            gaps = [b - a for a, b in itertools.pairwise(chosen)]
            assert not gaps or max(gaps) - min(gaps) <= 1


# What kernels of serving engines take. Shapes as [N, K].


def layer(name, n, k, scheme="nvfp4", experts=None):
    return PackedWeight(f"{name}.weight", QuantScheme.parse(scheme), (n, k), {}, experts)


def test_shapes_of_common_models_raise_no_warning():
    llama = [("q_proj", 4096, 4096), ("k_proj", 1024, 4096), ("gate_proj", 14336, 4096), ("down_proj", 4096, 14336)]
    assert not lint([layer(f"model.layers.0.x.{name}", n, k) for name, n, k in llama], "compressed-tensors")


def test_projections_that_are_fused_count_together():
    parts = [layer(f"a.{p}_proj", n, 256) for p, n in (("q", 64), ("k", 32), ("v", 32))]
    assert not lint(parts, "modelopt")
    (text,) = lint(parts[1:2], "modelopt")
    assert "Marlin" in text
    assert "[32, 256]" in text


@pytest.mark.parametrize(
    ("n", "k", "scheme", "experts", "words"),
    [
        (2880, 2880, "mxfp4", None, ["Marlin"]),  # 2880 = 45 x 64 in both directions, as vLLM issue 38022 met it
        (48, 128, "nvfp4", None, ["Marlin", "CUTLASS"]),
        (64, 80, "nvfp4", None, ["Marlin", "CUTLASS"]),
        (64, 72, "nvfp4", None, ["whole blocks", "Marlin", "CUTLASS"]),
        (2944, 2688, "nvfp4", 8, []),
        (1856, 2688, "nvfp4", 8, ["experts"]),
    ],
)
def test_shapes_that_kernels_refuse_are_named(n, k, scheme, experts, words):
    found = lint([layer("model.layers.0.w", n, k, scheme, experts)], "compressed-tensors")
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text
    assert not lint([layer("model.layers.0.w", n, k, scheme, experts)], "mxquant")
