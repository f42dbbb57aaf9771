"""The import hook: our checkpoints are known to a process that never imports mxquant, and where they
are not, loading fails rather than giving random weights."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto

import mxquant
from mxquant import _autoload
from mxquant.transformers import register


def quantized_checkpoint(folder, architecture="llama", scheme=None):
    """A tiny quantized checkpoint, written by hand."""
    torch.manual_seed(0)
    if architecture == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=None, **sizes))
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    model.save_pretrained(folder)
    scheme = scheme or mxquant.QuantScheme(scale="ue5m3", block=16)
    tensors, modules = load_file(folder / "model.safetensors"), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and name != "lm_head":
            transposed = isinstance(module, Conv1D)
            weight = tensors[f"{name}.weight"]
            q = mxquant.quantize(weight.t().contiguous() if transposed else weight, scheme)
            tensors[f"{name}.weight"] = q.packed.flatten() if scheme.element_format.bits == 8 else q.packed
            tensors[f"{name}.weight_scale"] = q.scale
            modules.append({"names": [name], "scheme": "s", "shape": list(q.shape), "transposed": transposed})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxquant",
        "format_version": 1,
        "mxquant_version": mxquant.__version__,
        "schemes": {"s": scheme.to_dict()},
        "modules": modules,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(code, *arguments, **environment):
    # Outside the checkout: only what is installed counts.
    command = [sys.executable, "-c", code, *map(str, arguments)]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MXQUANT_AUTOLOAD")}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env={**clean, **environment}, timeout=120)


LOAD = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
layer = model.model.layers[0].mlp.up_proj
print(type(layer).__name__, layer.weight.dtype, list(layer.weight.shape))
print(model.generate(max_new_tokens=4, do_sample=False).tolist())
"""


def test_a_process_that_only_imports_transformers_loads_the_packed_model(tmp_path):
    # The registry is imported first, which makes it import torch, and the hook run, halfway through.
    result = run("import transformers.quantizers.auto\n" + LOAD, quantized_checkpoint(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "QuantLinear torch.uint8 [64, 16]"
    expected = mxquant.load(tmp_path).generate(max_new_tokens=4, do_sample=False)
    assert json.loads(lines[1]) == expected.tolist()


def test_with_the_hook_off_loading_fails(tmp_path):
    result = run(LOAD, quantized_checkpoint(tmp_path), MXQUANT_AUTOLOAD="0")
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr
    assert "up_proj" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("preset", ["mxfp4", "mxfp6", "mxfp8"])
def test_unknown_to_transformers_no_format_gives_random_weights(architecture, preset, tmp_path, monkeypatch):
    path = quantized_checkpoint(tmp_path, architecture, mxquant.QuantScheme.preset(preset))
    assert AutoModelForCausalLM.from_pretrained(path) is not None
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "mxquant")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "mxquant")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(path)


def test_the_hook_costs_import_torch_next_to_nothing_and_can_be_turned_off_in_torch():
    code = """
import sys, time, torch
assert "mxquant" not in sys.modules, "torch's own switch was ignored"
modules, finders, times = set(sys.modules), list(sys.meta_path), []
for _ in range(5):  # the best of some, as the machine may be busy
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.meta_path[:] = finders
    start = time.process_time()
    import mxquant._autoload
    mxquant._autoload.install()
    times.append(time.process_time() - start)
print(min(times))
new = {m.split(".")[0] for m in set(sys.modules) - modules}
assert not new & {"transformers", "numpy", "yaml"}, new
"""
    result = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.005


def test_registering_again_changes_nothing():
    register()
    before = auto.AUTO_QUANTIZER_MAPPING["mxquant"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["mxquant"]
    register()
    _autoload.install()
    assert (auto.AUTO_QUANTIZER_MAPPING["mxquant"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["mxquant"]) == before


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module that stands for transformers' registry, and the list of what the hook does."""
    (tmp_path / "registry_stand_in.py").write_text("import hook_log\nhook_log.events.append('executed')\n")
    (tmp_path / "hook_log.py").write_text("events = []\n")
    (tmp_path / "unrelated_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _autoload._Finder)])
    monkeypatch.delenv("MXQUANT_AUTOLOAD", raising=False)
    events = importlib.import_module("hook_log").events
    steps = {"registry_stand_in": lambda: events.append("registered"), "no_such_registry": lambda: events.append("?")}
    monkeypatch.setattr(_autoload, "_STEPS", steps)
    yield events
    for name in ("registry_stand_in", "hook_log", "unrelated_module"):
        sys.modules.pop(name, None)


def test_the_hook_registers_once_the_target_is_whole_and_leaves_no_trace(target):
    before = list(sys.meta_path)
    _autoload.install()
    _autoload.install()
    assert target == []
    module = importlib.import_module("registry_stand_in")
    assert target == ["executed", "registered"]
    (finder,) = (f for f in sys.meta_path if f not in before)
    assert finder.target == "no_such_registry"
    assert type(module.__loader__) is type(module.__spec__.loader) is type(importlib.import_module("json").__loader__)
    assert importlib.reload(module) is module


def test_a_target_that_is_there_already_is_registered_at_once(target):
    importlib.import_module("registry_stand_in")
    _autoload.install()
    assert target == ["executed", "registered"]


def test_a_target_that_is_half_imported_is_registered_when_it_is_whole(target):
    module = importlib.import_module("registry_stand_in")
    module.__spec__._initializing = True
    _autoload.install()
    assert target == ["executed"]
    module.__spec__._initializing = False
    importlib.import_module("unrelated_module")
    assert target == ["executed", "registered"]
    assert {f.target for f in sys.meta_path if isinstance(f, _autoload._Finder)} == {"no_such_registry"}


@pytest.mark.parametrize("value", ["0", "false", "off", "No"])
def test_the_switch_is_off(value, target, monkeypatch):
    monkeypatch.setenv("MXQUANT_AUTOLOAD", value)
    _autoload.install()
    importlib.import_module("registry_stand_in")
    assert target == ["executed"]


def test_without_the_target_nothing_happens(target):
    _autoload.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_registry")
    assert target == []


def test_a_transformers_that_is_too_old_gives_a_warning_and_no_error(monkeypatch):
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "mxquant")
    monkeypatch.delattr(auto, "register_quantizer")
    with pytest.warns(UserWarning, match="could not register"):
        _autoload.install()
