"""What lies in a source folder beside the model: links, adapters, modules, other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from broken_inputs import tree
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.cli.main import main
from mxquant.convert.output import check_output
from mxquant.convert.pipeline import plan_model
from mxquant.errors import CheckpointError
from mxquant.inspection.verify import verify_checkpoint
from mxquant.transformers.gguf import GgufCheckpoint

SCHEME = "ue5m3/16"


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def source(make_checkpoint, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama-tied", "bfloat16"), folder)
    return folder


# --- the source's files are links into the output ----------------------------------------------------


@pytest.mark.parametrize("place", ["out", "out.partial/model"])
@pytest.mark.parametrize("names", [["model.safetensors"], ["config.json"], ["tokenizer_config.json"], None])
def test_files_of_the_source_in_the_output_are_not_replaced(names, place, source, tmp_path):
    real = tmp_path / place
    real.parent.mkdir(exist_ok=True)
    shutil.copytree(source, real)
    for name in names or [p.name for p in source.iterdir()]:
        (source / name).unlink()
        (source / name).symlink_to(real / name)
    before = tree(tmp_path)
    for command in (["quantize", source, "-o"], ["quantize", source, "--resume", "-o"]):
        result = run(*command, tmp_path / "out", "--overwrite")
        assert result.exit_code == 1
        assert "is a link to" in result.stderr
        assert tree(tmp_path) == before
    with pytest.raises(CheckpointError, match="choose another --out"):
        mxquant.quantize_model(source, tmp_path / "out", SCHEME, overwrite=True)
    assert tree(tmp_path) == before
    mxquant.quantize_model(source, tmp_path / "elsewhere", SCHEME)


def test_links_over_several_steps_and_outputs_behind_links(source, tmp_path):
    real = tmp_path / "real"
    source.rename(real)
    source.mkdir()
    (tmp_path / "step").symlink_to(real / "model.safetensors")
    (tmp_path / "out").symlink_to("real")
    shutil.copy(real / "config.json", source)
    (source / "model.safetensors").symlink_to("../step")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="is a link to"):
        mxquant.quantize_model(source, tmp_path / "out", SCHEME, overwrite=True)
    assert tree(tmp_path) == before


def test_dequantizing_into_the_folder_that_the_links_lead_to(source, tmp_path):
    mxquant.quantize_model(source, tmp_path / "real", SCHEME)
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "real").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="is a link to"):
        mxquant.dequantize_model(tmp_path / "links", tmp_path / "real", overwrite=True)
    assert tree(tmp_path) == before


def test_a_gguf_file_behind_a_link(source, tmp_path):
    """Such sources say themselves which files they read, as their folder is a temporary one."""
    out, links = tmp_path / "out", tmp_path / "links"
    shutil.copytree(source, out)
    (out / "model.gguf").write_bytes(b"GGUF")
    links.mkdir()
    (links / "model.gguf").symlink_to(out / "model.gguf")
    checkpoint = GgufCheckpoint.__new__(GgufCheckpoint)  # a whole one takes a package that may not be here
    checkpoint.source, checkpoint._origins = links, [links / "model.gguf"]
    with pytest.raises(CheckpointError, match="is a link to"):
        check_output(out, checkpoint, overwrite=True)


# --- adapters ------------------------------------------------------------------------------------------


def _adapter(source: Path) -> None:
    """A LoRA adapter beside the model, as PEFT saves it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(source)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(source)


def test_an_adapter_beside_a_model_is_refused_as_transformers_would_add_it(source, tmp_path):
    from transformers import AutoModelForCausalLM

    base = load_file(source / "model.safetensors")
    _adapter(source)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    assert any("lora" in name for name, _ in loaded.named_parameters())  # what we must not lose in silence
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"merge_and_unload.*remove adapter_config.json and adapter_model.safet"):
        mxquant.quantize_model(source, tmp_path / "q", SCHEME)
    assert tree(tmp_path) == before
    # One way out: without the config, transformers does not look at the adapter, and the base is what it loads.
    (source / "adapter_config.json").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.weight, base["model.layers.0.self_attn.q_proj.weight"])
    report = mxquant.quantize_model(source, tmp_path / "q", SCHEME)
    assert any("adapter_model.safetensors" in w for w in report.plan.warnings)
    assert not list((tmp_path / "q").glob("adapter*"))


def test_an_adapter_config_without_weights_is_refused_as_transformers_fails(source, tmp_path):
    from transformers import AutoModelForCausalLM

    _adapter(source)
    (source / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(CheckpointError, match=r"weights are not there.*remove adapter_config.json"):
        mxquant.quantize_model(source, tmp_path / "q", SCHEME)
    (source / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"remove adapter_config.json and adapter_model.bin"):
        mxquant.quantize_model(source, tmp_path / "q", SCHEME)


def test_an_adapter_beside_an_output(source, tmp_path):
    mxquant.quantize_model(source, tmp_path / "q", SCHEME)
    (tmp_path / "q/adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert [fault.kind for fault in verify_checkpoint(tmp_path / "q").faults] == ["config"]
    with pytest.raises(CheckpointError, match="adapter"):
        mxquant.dequantize_model(tmp_path / "q", tmp_path / "dense")


# --- modules and other weights -------------------------------------------------------------------------

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "more/3_Dense", "type": "sentence_transformers.models.Dense"},
]


def _modules(source: Path, linked: Path | None = None) -> None:
    (source / "modules.json").write_text(json.dumps(MODULES))
    for entry in MODULES[1:]:
        folder = source / entry["path"]
        if linked is not None and entry["path"] == "2_Dense":
            folder.symlink_to(linked)
            folder = linked
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"in_features": 8, "out_features": 8}))
        if "Dense" in entry["path"]:
            save_file({"linear.weight": torch.randn(8, 8)}, folder / "model.safetensors")
            torch.save({"linear.weight": torch.randn(8, 8)}, folder / "pytorch_model.bin")


@pytest.mark.parametrize("link", [False, True])
def test_modules_that_modules_json_names_are_carried_along(link, source, tmp_path):
    _modules(source, tmp_path / "linked" if link else None)
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_bytes(b"")
    report = mxquant.quantize_model(source, tmp_path / "q", SCHEME)
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "dense")
    for entry in MODULES[1:]:
        for file in (source / entry["path"]).iterdir():
            for out in ("q", "dense"):
                assert (tmp_path / out / entry["path"] / file.name).read_bytes() == file.read_bytes()
    assert [w for w in report.plan.warnings if "left out" in w and "onnx/" in w]
    assert not [w for w in report.plan.warnings if "Dense" in w]
    assert not verify_checkpoint(tmp_path / "q", source, samples=None).faults


@pytest.mark.parametrize("content", ["{", "[]", "{}", '[{"path": "../out"}]', '[{"path": 3}]', '[{"path": "/etc"}, 3]'])
def test_a_modules_json_that_names_nothing_of_use(content, source, tmp_path):
    (source / "modules.json").write_text(content)
    (source / "2_Dense").mkdir()
    save_file({"linear.weight": torch.randn(8, 8)}, source / "2_Dense/model.safetensors")
    _, plan = plan_model(source, SCHEME)
    assert [w for w in plan.warnings if "2_Dense/" in w]


def test_the_plan_names_every_folder_and_weight_file_that_is_left_out(source, tmp_path):
    for name in ("onnx/model.onnx", "checkpoint-5/optimizer.pt", "original/params.json", "original/a/b.pth"):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_bytes(b"{}")
    for name in ("tf_model.h5", "pytorch_model.bin", "old.safetensors"):
        (source / name).write_bytes(b"")
    (tmp_path / "linked").mkdir()
    (source / "linked").symlink_to(tmp_path / "linked")
    _, plan = plan_model(source, SCHEME)
    told = " ".join(w for w in plan.warnings if w.startswith("left out"))
    for name in (
        "onnx/",
        "checkpoint-5/",
        "original/",
        "tf_model.h5",
        "pytorch_model.bin",
        "old.safetensors",
        "linked/",
    ):
        assert name in told, name
    result = run("quantize", source, "-o", tmp_path / "q", "--dry-run")
    assert "left out: " in result.output


def test_a_folder_with_nothing_else_in_it_has_no_warnings(source):
    (source / ".cache").mkdir()
    (source / ".cache/weights.bin").write_bytes(b"")
    assert not plan_model(source, SCHEME)[1].warnings


def test_weights_of_modules_are_downloaded_whatever_their_kind(monkeypatch, source, tmp_path):
    import huggingface_hub

    from mxquant.checkpoint.reader import resolve_source

    _modules(source)
    for name in ("2_Dense/model.safetensors", "more/3_Dense/model.safetensors"):
        (source / name).unlink()
    (source / "onnx").mkdir()
    (source / "onnx/model.bin").write_bytes(b"")
    local = tmp_path / "local"

    def download(repo, revision=None, allow_patterns=None, ignore_patterns=None):
        names = [str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, local / name)
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("me/model") == local
    mxquant.quantize_model("me/model", tmp_path / "q", SCHEME)
    for name in ("2_Dense", "more/3_Dense"):
        file = f"{name}/pytorch_model.bin"
        assert (tmp_path / "q" / file).read_bytes() == (source / file).read_bytes()
    assert not (local / "onnx").exists()
