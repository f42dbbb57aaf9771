"""What lies beside the weights: carried along byte for byte, of the revision asked for; custom code if trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import mxquant
from mxquant.checkpoint.reader import resolve_source
from mxquant.cli.main import main
from mxquant.errors import CheckpointError

SCHEME = mxquant.QuantScheme(scale="ue5m3", block=16, scale_rule="absmax")
# What the output has of its own, or changed.
OURS = {"config.json", "model.safetensors", "quantization_report.json", "README.md", "README.source.md"}
CARRIED = [
    "LICENSE",
    "NOTICE.txt",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "custom_generate/generate.py",
    "generation_config.json",
    "images/figure.png",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]
LEFT_OUT = [
    ".cache/huggingface/download/config.json.metadata",
    ".git/HEAD",
    ".gitattributes",
    "__pycache__/modeling.cpython-311.pyc",
    "checkpoint-10/optimizer.pt",
    "checkpoint-10/trainer_state.json",
    "consolidated.00.pth",
    "flax_model.msgpack",
    "model.Q4_0.gguf",
    "onnx/config.json",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "original/params.json",
    "original/tokenizer.model",
    "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
]


@pytest.fixture
def source(make_checkpoint, tmp_path):
    """A checkpoint in a folder of its own, which may be changed."""
    folder = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama-tied", "bfloat16"), folder)
    return folder


def _put(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def test_every_side_file_is_carried_along_and_no_other_weights(source, tmp_path):
    for name in [*CARRIED, *LEFT_OUT]:
        content = b"{}" if name.endswith(".json") else name.encode() + b"\r\n\x00\xff"
        _put(source, name, content)
    _put(source, "README.md", b"# The source\n")
    mxquant.quantize_model(source, tmp_path / "out", SCHEME)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found - OURS == set(CARRIED)
    for name in CARRIED:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    assert (tmp_path / "out/README.source.md").read_bytes() == b"# The source\n"


def test_config_keeps_every_field_that_it_had(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "of_nobody_else": {"a": [1, None]}}))
    mxquant.quantize_model(source, tmp_path / "out", SCHEME)
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert after.pop("quantization_config")
    assert after == {**config, "of_nobody_else": {"a": [1, None]}}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dense_tensors_keep_dtype_and_bytes_and_tied_ones_are_written_once(dtype, make_checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    source = make_checkpoint("llama-tied", dtype)
    mxquant.quantize_model(source, tmp_path / "out", SCHEME)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    dense = [name for name in before if f"{name}_scale" not in after]
    assert len(dense) == 1 + 2 * 2 + 1  # embedding and norms
    for name in dense:
        assert after[name].dtype == getattr(torch, dtype)
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
    assert "lm_head.weight" not in after
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == after.keys()
    assert all(torch.equal(t.view(torch.uint8), after[n].view(torch.uint8)) for n, t in again.items())


def test_chat_templates_of_both_kinds_are_the_same_in_the_output(source, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = {"default": "a {{ messages[0]['content'] }}", "tool_use": "b {{ tools }}"}
    tokenizer.save_pretrained(source)
    assert (source / "additional_chat_templates").is_dir()
    mxquant.quantize_model(source, tmp_path / "out", SCHEME)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    (tmp_path / "old").mkdir()
    tokenizer.chat_template = "c {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "old", save_jinja_files=False)  # inside tokenizer_config.json
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / "old")
    mxquant.quantize_model(tmp_path / "old", tmp_path / "out2", SCHEME)
    message = [{"role": "user", "content": "hello"}]
    text = AutoTokenizer.from_pretrained(tmp_path / "out2").apply_chat_template(message, tokenize=False)
    assert text == "c hello"


# --- custom code ----------------------------------------------------------------------------------

MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM


class {name}Config(LlamaConfig):
    model_type = "{kind}"


class {name}ForCausalLM(LlamaForCausalLM):
    config_class = {name}Config

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = {factor} * out.logits
        return out
"""


def _give_code(folder: Path, name: str, factor: int = 2) -> None:
    """Turn a Llama into a model whose class comes with it."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": f"{name}-kind".lower(), "architectures": [f"{name}ForCausalLM"]}
    module = f"modeling_{name.lower()}"
    classes = {"AutoConfig": f"{name}Config", "AutoModelForCausalLM": f"{name}ForCausalLM"}
    config["auto_map"] = {auto: f"{module}.{cls}" for auto, cls in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    text = MODELING.format(name=name, kind=config["model_type"], factor=factor)
    (folder / f"{module}.py").write_text(text)


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """transformers copies custom code into a cache and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def test_custom_code_is_refused_unless_trusted(source, tmp_path, modules_cache):
    _give_code(source, "Wary")
    (source / "modeling_wary.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for command in ("quantize", "diagnose"):
        out = ["-o", str(tmp_path / "out")] if command == "quantize" else []
        result = CliRunner().invoke(main, [command, str(source), *out])
        assert result.exit_code == 1
        (line,) = result.stderr.strip().splitlines()
        assert "comes with code of its own; pass --trust-remote-code" in line
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_trusted_code_is_run_carried_along_and_found_by_the_output(source, tmp_path, modules_cache):
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[1, 5, 9]])
    _give_code(source, "Mine", factor=3)
    (source / "helper.py").write_text("# imported by nobody")
    result = CliRunner().invoke(main, ["quantize", str(source), "-o", str(tmp_path / "out"), "--trust-remote-code"])
    assert result.exit_code == 0, result.output
    for name in ("modeling_mine.py", "helper.py"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "MineForCausalLM"
    assert isinstance(model.model.layers[0].mlp.up_proj, mxquant.QuantLinear)
    with torch.no_grad():
        expected = 3 * model.lm_head(model.model(tokens).last_hidden_state)
        assert torch.equal(model(tokens).logits, expected)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    config = mxquant.MXQuantConfig()
    fly = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, quantization_config=config)
    assert torch.equal(fly.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_code_beside_a_model_that_transformers_knows_is_not_run(source, tmp_path, modules_cache):
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_old.OldForCausalLM"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "modeling_old.py").write_text("raise RuntimeError('ran')")
    mxquant.quantize_model(source, tmp_path / "out", SCHEME)
    assert (tmp_path / "out/modeling_old.py").exists()


# --- revisions ------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``hub(repo, {revision: folder})`` puts folders into a cache, as downloads would."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(repo: str, revisions: dict[str, Path]) -> None:
        place = cache / f"models--{repo.replace('/', '--')}"
        for number, (name, folder) in enumerate(revisions.items()):
            commit = f"{number + 1:040x}"
            _put(place, f"refs/{name}", commit.encode())
            shutil.copytree(folder, place / "snapshots" / commit)

    return put


def test_a_revision_is_that_of_config_weights_tokenizer_and_code(hub, source, make_checkpoint, tmp_path, modules_cache):
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other"
    shutil.copytree(make_checkpoint("llama", "float32"), other)
    for folder, factor in ((source, 2), (other, 5)):
        _give_code(folder, "Dated", factor)
        (folder / "tokenizer_config.json").write_text(json.dumps({"of": factor}))
    hub("me/model", {"main": source, "v2": other})
    for revision, folder, factor in (("v2", other, 5), (None, source, 2)):
        out = tmp_path / f"out{factor}"
        args = ["quantize", "me/model", "-o", str(out), "--trust-remote-code", "--scale-rule", "absmax"]
        result = CliRunner().invoke(main, [*args, *(["--revision", revision] if revision else [])])
        assert result.exit_code == 0, result.output
        mxquant.quantize_model(folder, tmp_path / f"direct{factor}", SCHEME, trust_remote_code=True)
        for name in ("model.safetensors", "config.json", "tokenizer_config.json", "modeling_dated.py"):
            assert (out / name).read_bytes() == (tmp_path / f"direct{factor}" / name).read_bytes(), name
        assert f"{factor} * out.logits" in (out / "modeling_dated.py").read_text()
        card = (out / "README.md").read_text()
        assert "base_model: me/model" in card
        assert f"revision `{2 if revision else 1:040x}`" in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out5", trust_remote_code=True)
    assert not model.config.tie_word_embeddings
    with pytest.raises(CheckpointError, match="me/model"):
        mxquant.quantize_model("me/model", tmp_path / "no", SCHEME, revision="v3")


def test_what_is_downloaded_is_what_is_read(monkeypatch, make_checkpoint, tmp_path):
    """Safetensors and side files, and ``.bin`` files only where there are no others."""
    import huggingface_hub

    for has_safetensors in (True, False):
        remote, local = tmp_path / f"remote{has_safetensors}", tmp_path / f"local{has_safetensors}"
        shutil.copytree(make_checkpoint("llama"), remote)
        for name in ("pytorch_model.bin", "training_args.bin", "original/params.json", "onnx/model.onnx", "LICENSE"):
            _put(remote, name, b"")
        if not has_safetensors:
            (remote / "model.safetensors").unlink()
        revisions = []

        def download(repo, revision=None, allow_patterns=None, ignore_patterns=None, remote=remote, local=local,
                     revisions=revisions):  # fmt: skip
            revisions.append(revision)
            names = [str(p.relative_to(remote)) for p in remote.rglob("*") if p.is_file()]
            for name in huggingface_hub.utils.filter_repo_objects(
                names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                _put(local, name, (remote / name).read_bytes())
            return str(local)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert resolve_source("me/model", revision="v1") == local
        assert set(revisions) == {"v1"}
        found = {str(p.relative_to(local)) for p in local.rglob("*") if p.is_file()}
        weights = "model.safetensors" if has_safetensors else "pytorch_model.bin"
        assert found == {weights, "config.json", "generation_config.json", "tokenizer_config.json", "LICENSE"}
