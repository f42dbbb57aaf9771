"""Sources other than safetensors: ``pytorch_model.bin`` and ``.gguf``, and which of several files is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import mxquant
from mxquant.cli.main import main
from mxquant.convert.open_source import open_source
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError

# With random bits, names, order and layout have to be right too.
SCHEME = mxquant.QuantScheme(scale="ue5m3", block=16, scale_rule="absmax", rounding="stochastic")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def _as_bin(source: Path, out: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """The same checkpoint as ``pytorch_model.bin``."""
    tensors = _tensors(source)
    out.mkdir()
    for file in source.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, out)
    names = sorted(tensors)
    files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    files = ["pytorch_model.bin"] if shards == 1 else files
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        part = {n: tensors[n] for n in names if weight_map[n] == file}
        torch.save(part, out / file, _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        (out / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out


def _mapped_file(tensor: torch.Tensor) -> str:
    """The file that the memory of a tensor is a view of."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is mapped")
    for line in maps.read_text().splitlines():
        start, stop = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return line.split()[-1]
    raise AssertionError


class TestPytorchFiles:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "mixtral-even"])
    def test_give_the_bytes_that_safetensors_give(self, kind, dtype, make_checkpoint, tmp_path):
        source = make_checkpoint(kind, dtype)
        mxquant.quantize_model(source, tmp_path / "a", SCHEME, seed=5)
        mxquant.quantize_model(_as_bin(source, tmp_path / "bin"), tmp_path / "b", SCHEME, seed=5)
        _assert_same(_tensors(tmp_path / "a"), _tensors(tmp_path / "b"))
        dense = {n: t.dtype for n, t in _tensors(tmp_path / "b").items() if "norm" in n}
        assert set(dense.values()) <= {getattr(torch, dtype)}

    @pytest.mark.parametrize("shape", [{"shards": 3}, {"legacy": True}, {"shards": 2, "legacy": True}], ids=str)
    def test_in_shards_and_of_old_give_them_too(self, shape, make_checkpoint, tmp_path):
        source = make_checkpoint("llama", "bfloat16")
        mxquant.quantize_model(source, tmp_path / "a", "nvfp4")
        mxquant.quantize_model(_as_bin(source, tmp_path / "bin", **shape), tmp_path / "b", "nvfp4")
        _assert_same(_tensors(tmp_path / "a"), _tensors(tmp_path / "b"))

    def test_are_mapped_unless_they_are_old_and_the_plan_says_so(self, make_checkpoint, tmp_path):
        source = make_checkpoint("llama", "bfloat16")
        mapped, plan = plan_model(_as_bin(source, tmp_path / "new"), "mxfp4")
        assert _mapped_file(mapped.read("model.norm.weight")).endswith("/new/pytorch_model.bin")
        assert plan.held_bytes == 0
        _, held = plan_model(_as_bin(source, tmp_path / "old", legacy=True), "mxfp4")
        assert held.held_bytes == held.bytes_before == held.peak_bytes - plan.peak_bytes
        text = CliRunner().invoke(main, ["quantize", str(tmp_path / "old"), "--dry-run"]).output
        assert "of it for the source, which cannot be mapped" in text

    def test_a_tied_weight_in_them_is_written_once(self, make_checkpoint, tmp_path):
        source = _as_bin(make_checkpoint("llama-tied"), tmp_path / "bin")
        tensors = torch.load(source / "pytorch_model.bin")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # as state_dict() has it
        torch.save(tensors, source / "pytorch_model.bin")
        report = mxquant.quantize_model(source, tmp_path / "out", SCHEME)
        assert report.plan.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in _tensors(tmp_path / "out")

    def test_masks_of_old_that_the_model_ignores_are_no_weights_left_dense(self, make_checkpoint, tmp_path):
        source = _as_bin(make_checkpoint("gpt2"), tmp_path / "bin")
        tensors = torch.load(source / "pytorch_model.bin")
        masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        torch.save(tensors | masks, source / "pytorch_model.bin")
        report = mxquant.quantize_model(source, tmp_path / "out", SCHEME)
        kinds = {t.name: t.kind for t in report.plan.tensors}
        assert {kinds[name] for name in masks} == {"ignored"}
        after = _tensors(tmp_path / "out")
        assert all(torch.equal(after[name], mask) for name, mask in masks.items())

    @pytest.mark.parametrize(("kind", "shards"), [("qwen2", 2), ("gpt2", 1), ("mixtral-even", 1)])
    def test_quantized_on_the_fly_give_the_same_bytes(self, kind, shards, make_checkpoint, tmp_path):
        from transformers import AutoModelForCausalLM

        source = _as_bin(make_checkpoint(kind), tmp_path / "bin", shards=shards)
        mxquant.quantize_model(source, tmp_path / "out", "nvfp4")
        config = mxquant.MXQuantConfig(preset="nvfp4")
        fly = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
        a, b = fly.state_dict(), mxquant.load(tmp_path / "out").state_dict()
        assert any(t.dtype == torch.float8_e4m3fn for t in a.values())
        _assert_same(a, b)

    def test_no_code_of_them_runs(self, make_checkpoint, tmp_path):
        class Attack:
            def __reduce__(self):
                return Path.touch, (tmp_path / "ran",)

        for legacy in (False, True):
            source = _as_bin(make_checkpoint("llama"), tmp_path / f"bin{legacy}")
            tensors = torch.load(source / "pytorch_model.bin") | {"model.extra": Attack()}
            torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
            with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: holds more than tensors"):
                open_source(source)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"state_dict": {"model.norm.weight": torch.ones(2)}}, "state_dict is a dict, not a tensor"),
            ([torch.ones(2)], "holds a list"),
            ({"a": torch.eye(3).to_sparse()}, "tensor a: .*sparse"),
            ({}, "hold no tensors"),
            (b"version https://git-lfs.github.com/spec/v1", "not a complete PyTorch file"),
            (b"", "not a complete PyTorch file"),
        ],
        ids=["nested", "list", "sparse", "empty dict", "pointer", "empty"],
    )
    def test_that_hold_something_else_are_named(self, content, message, make_checkpoint, tmp_path):
        source = _as_bin(make_checkpoint("llama"), tmp_path / "bin")
        file = source / "pytorch_model.bin"
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(CheckpointError, match=message) as error:
            open_source(source)
        assert "\n" not in str(error.value)

    def test_that_are_not_whole_are_named(self, make_checkpoint, tmp_path):
        source = _as_bin(make_checkpoint("llama"), tmp_path / "bin", shards=2)
        shard = source / "pytorch_model-00002-of-00002.bin"
        whole = shard.read_bytes()
        shard.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=shard.name):
            open_source(source)
        shard.unlink()
        with pytest.raises(CheckpointError, match=f"index.json names {shard.name}, which is not in"):
            open_source(source)
        (source / "pytorch_model.bin.index.json").unlink()
        with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
            open_source(source)


def test_safetensors_take_precedence_and_nothing_stands_in_for_broken_ones(make_checkpoint, tmp_path):
    source = tmp_path / "both"
    shutil.copytree(make_checkpoint("llama"), source)
    torch.save({n: t + 1 for n, t in _tensors(source).items()}, source / "pytorch_model.bin")
    (source / "model.gguf").write_bytes(b"")
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "a", SCHEME)
    mxquant.quantize_model(source, tmp_path / "b", SCHEME)
    _assert_same(_tensors(tmp_path / "a"), _tensors(tmp_path / "b"))
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_source(source)
    file.unlink()
    file.symlink_to(source / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*No such file"):
        open_source(source)


# --- GGUF -----------------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def _interleaved(weight, heads):
    """Rows of a query or key projection in the order in which llama.cpp rotates them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(0, 2, 1, 3).reshape(rows, columns)


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


@pytest.fixture(scope="module")
def write_gguf(llama):
    """``write_gguf(file, kind="F32", tokenizer=True, leave_out=())`` writes the model with llama.cpp's own package."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    def write(file: Path, kind: str = "F32", *, tokenizer: bool = True, leave_out: tuple[str, ...] = ()) -> Path:
        kind = getattr(gguf.GGMLQuantizationType, kind)
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_name("tiny")
        writer.add_context_length(64)
        writer.add_embedding_length(64)
        writer.add_block_count(2)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_dimension_count(16)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(40)
        if tokenizer:
            words = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "ab", "▁ab"]
            words += [f"<{i}>" for i in range(40 - len(words))]
            writer.add_tokenizer_model("llama")
            writer.add_token_list(words)
            writer.add_token_scores([-float(i) for i in range(40)])
            writer.add_token_types([2, 3, 3] + [1] * 37)
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_unk_token_id(0)
            writer.add_chat_template(TEMPLATE)
        names = dict(_TOP)
        names |= {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for i in range(2) for a, b in _LAYER.items()}
        for name, tensor in llama.state_dict().items():
            data, module = tensor.numpy(), name.removesuffix(".weight")
            if module in leave_out:
                continue
            if module.endswith(("q_proj", "k_proj")):
                data = _interleaved(data, 4 if module.endswith("q_proj") else 2)
            data = np.ascontiguousarray(data)
            if data.ndim == 2 and kind.name != "F32":
                writer.add_tensor(f"{names[module]}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{names[module]}.weight", data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


class TestGguf:
    def test_of_fp32_gives_the_bytes_of_the_model_that_it_was_made_from(self, llama, write_gguf, tmp_path):
        llama.save_pretrained(tmp_path / "dense")
        mxquant.quantize_model(tmp_path / "dense", tmp_path / "a", SCHEME, seed=5)
        mxquant.quantize_model(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "b", SCHEME, seed=5)
        _assert_same(_tensors(tmp_path / "a"), _tensors(tmp_path / "b"))

    @pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
    def test_gives_the_bytes_of_what_transformers_makes_of_it(self, kind, dtype, write_gguf, tmp_path):
        from transformers import AutoModelForCausalLM, GgufConfig

        write_gguf(tmp_path / "tiny.gguf", kind)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="tiny.gguf", dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(tmp_path / "dense")
        mxquant.quantize_model(tmp_path / "dense", tmp_path / "a", SCHEME)
        report = mxquant.quantize_model(tmp_path / "tiny.gguf", tmp_path / "b", SCHEME)
        _assert_same(_tensors(tmp_path / "a"), _tensors(tmp_path / "b"))
        assert json.loads((tmp_path / "b/config.json").read_text())["dtype"] == dtype
        assert report.plan.held_bytes == report.plan.bytes_before
        assert [("Q8_0" in w) for w in report.plan.warnings] == [True] * (kind == "Q8_0")

    def test_output_is_whole_with_tokenizer_and_template(self, write_gguf, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = write_gguf(tmp_path / "tiny.gguf")
        (tmp_path / "other.txt").write_text("of no concern")
        mxquant.quantize_model(source, tmp_path / "out", SCHEME)
        assert not (tmp_path / "out/other.txt").exists()
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
        ours = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert ours("ab cab")["input_ids"] == theirs("ab cab")["input_ids"] != []
        assert ours.chat_template == TEMPLATE
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(model).__name__ == "LlamaForCausalLM"
        assert isinstance(model.model.layers[0].mlp.up_proj, mxquant.QuantLinear)
        assert model.generation_config.eos_token_id == 2
        verified = CliRunner().invoke(main, ["verify", str(tmp_path / "out"), "--source", str(source)])
        assert verified.exit_code == 0, verified.output

    def test_as_the_only_weights_of_a_folder_brings_its_side_files(self, write_gguf, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        write_gguf(folder / "tiny.gguf")
        (folder / "LICENSE").write_text("free")
        (folder / "tokenizer_config.json").write_text("{}")  # the file's own counts
        mxquant.quantize_model(folder, tmp_path / "out", SCHEME)
        assert (tmp_path / "out/LICENSE").read_text() == "free"
        assert (tmp_path / "out/tokenizer_config.json").read_text() != "{}"
        assert not list((tmp_path / "out").glob("*.gguf"))
        write_gguf(folder / "second.gguf")
        with pytest.raises(CheckpointError, match=r"2 GGUF files \(second\.gguf, tiny\.gguf\)"):
            open_source(folder)

    def test_dry_run_says_that_the_whole_model_is_held(self, write_gguf, tmp_path, monkeypatch):
        write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.chdir(tmp_path)
        plan = json.loads(CliRunner().invoke(main, ["quantize", "tiny.gguf", "--dry-run", "--json"]).stdout)
        assert plan["held_bytes"] == plan["bytes_before"] < plan["predicted_peak_bytes"]
        assert plan["out"].startswith("tiny-")
        done = CliRunner().invoke(main, ["quantize", "tiny.gguf", "--json"])
        assert done.exit_code == 0, done.output
        assert (tmp_path / plan["out"] / "model.safetensors").exists()

    def test_without_a_tokenizer_is_told_before_the_work(self, write_gguf, tmp_path):
        _, plan = plan_model(write_gguf(tmp_path / "tiny.gguf", tokenizer=False), SCHEME)
        assert len(plan.warnings) == 1
        assert "no tokenizer" in plan.warnings[0]

    def test_that_lacks_a_tensor_is_refused(self, write_gguf, tmp_path):
        file = write_gguf(tmp_path / "tiny.gguf", leave_out=("model.layers.1.mlp.up_proj",))
        with pytest.raises(CheckpointError, match=r"tiny\.gguf: lacks model\.layers\.1\.mlp\.up_proj\.weight"):
            mxquant.quantize_model(file, tmp_path / "out", SCHEME)
        assert not (tmp_path / "out").exists()

    def test_needs_the_package_gguf_and_says_how_to_get_it(self, write_gguf, tmp_path, monkeypatch):
        file = write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setattr("mxquant.extras.find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"pip install 'mxquant\[gguf\]'"):
            open_source(file)

    def test_that_cannot_be_read_is_named(self, write_gguf, tmp_path):
        whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
        cases = {
            "junk.gguf": (b"junk" * 20, "not a complete GGUF file"),
            "cut.gguf": (whole[:20_000], "not a complete GGUF"),
        }
        cases["model-00002-of-00003.gguf"] = (whole, "one part of a model")
        cases["other.gguf"] = (whole.replace(b"llama", b"alien"), "alien")
        for name, (content, message) in cases.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=message) as error:
                open_source(tmp_path / name)
            assert name in str(error.value)
            assert "\n" not in str(error.value)
        with pytest.raises(CheckpointError, match="no such file"):
            open_source(tmp_path / "nowhere.gguf")
