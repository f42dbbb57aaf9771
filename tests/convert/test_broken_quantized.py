"""Broken quantized checkpoints: whatever loads, dequantizes or verifies them says what is wrong, in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from broken_inputs import Fault, edit_json, run, stderr_line, tree
from broken_quantized import COMPRESSED, OWN, lost, module, stored

import mxquant
from mxquant.errors import CheckpointError
from mxquant.inspection.faults import KINDS

FORMATS = {"own": ("ue5m3/16", OWN), "compressed-tensors": ("nvfp4", COMPRESSED)}
# Without an index or a single file, transformers has a sentence of its own.
NO_FILE = "weights missing"


@pytest.fixture(scope="session")
def quantized(good_checkpoint, tmp_path_factory):
    """A folder for each format."""
    folder = tmp_path_factory.mktemp("quantized")
    for name, (scheme, _) in FORMATS.items():
        report = mxquant.quantize_model(good_checkpoint, folder / name, scheme)
        assert report.plan.on_disk == ("mxquant" if name == "own" else name)
    return folder


@pytest.fixture
def broken(request, quantized, tmp_path) -> tuple[Fault, Path]:
    """A broken copy, and what is wrong with it."""
    name, fault = request.param
    folder = Path(shutil.copytree(quantized / name, tmp_path / "q"))
    fault.breaks(folder)
    return fault, folder


def all_faults(*formats: str):
    cases = [(name, fault) for name in formats for fault in FORMATS[name][1]]
    return pytest.mark.parametrize("broken", cases, indirect=True, ids=[f"{n}: {f.name}" for n, f in cases])


def says(message: str, fault: Fault) -> bool:
    assert len(message.splitlines()) == 1
    return not [words for words in fault.says if words not in message]


@pytest.mark.parametrize("name", FORMATS)
def test_the_checkpoints_are_good(name, quantized, tmp_path):
    mxquant.load(quantized / name)
    assert run("verify", quantized / name).exit_code == 0
    assert run("dequantize", quantized / name, tmp_path / "d").exit_code == 0


@all_faults("own", "compressed-tensors")
def test_load_says_what_is_wrong(broken):
    fault, folder = broken
    kind = OSError if fault.name == NO_FILE else CheckpointError
    with pytest.raises(kind) as caught:
        mxquant.load(folder)
    assert fault.name == NO_FILE or says(str(caught.value), fault), caught.value


@all_faults("own")
def test_from_pretrained_says_what_is_wrong(broken):
    from transformers import AutoModelForCausalLM

    fault, folder = broken
    kind = OSError if fault.name == NO_FILE else CheckpointError
    with pytest.raises(kind) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert fault.name == NO_FILE or says(str(caught.value), fault), caught.value


@all_faults("own", "compressed-tensors")
def test_dequantize_says_what_is_wrong_and_leaves_nothing_behind(broken, tmp_path):
    fault, folder = broken
    before = tree(tmp_path)
    result = run("dequantize", folder, tmp_path / "new" / "dense")
    assert result.exit_code == 1
    assert says(stderr_line(result), fault), result.stderr
    assert tree(tmp_path) == before


@all_faults("own", "compressed-tensors")
def test_verify_finds_it_and_inspect_shows_no_traceback(broken):
    fault, folder = broken
    result = run("verify", folder)
    assert result.exit_code in {kind.code for kind in KINDS.values()}, result.stdout
    assert "FAULT" in result.stdout
    inspected = run("inspect", folder)
    if inspected.exit_code:
        assert says(stderr_line(inspected), fault), inspected.stderr


@pytest.mark.parametrize("broken", [("own", OWN[0]), ("own", OWN[-4]), ("compressed-tensors", COMPRESSED[0])],
                         ids=lambda case: case[1].name, indirect=True)  # fmt: skip
@pytest.mark.parametrize("command", [("generate",), ("eval", "--text", "builtin", "--windows", "1")], ids=str)
def test_commands_that_run_a_model_say_it_too(command, broken):
    fault, folder = broken
    name, *options = command
    result = run(name, folder, *(["hello"] if name == "generate" else []), *options)
    assert result.exit_code == 1
    assert says(stderr_line(result), fault), result.stderr


def test_a_lost_norm_is_never_filled_with_random_numbers(quantized, tmp_path):
    folder = shutil.copytree(quantized / "own", tmp_path / "q")
    lost("model.norm.weight")(folder)
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.norm\.weight"):
        mxquant.load(folder)
    assert run("verify", folder).exit_code == KINDS["config"].code


def test_a_wrong_transposition_is_seen_by_verify(quantized, tmp_path):
    """Loading does not depend on it, and dequantizing knows nothing of the model's class."""
    folder = shutil.copytree(quantized / "own", tmp_path / "q")
    module(transposed=True)(folder)
    assert run("verify", folder).exit_code == KINDS["shapes"].code


@pytest.mark.parametrize(
    ("scales", "kind"), [(b"\xff" * 96, "scales"), (bytes(96), "scales")], ids=["not numbers", "zero"]
)
def test_scales_that_no_header_gives_away_are_seen_by_verify(scales, kind, quantized, tmp_path):
    folder = shutil.copytree(quantized / "own", tmp_path / "q")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    stored(name, "U8", [48, 2], scales)(folder)
    result = run("verify", folder)
    assert result.exit_code == KINDS[kind].code
    assert name.removesuffix("_scale") in result.stdout


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "no-such-method"])
def test_quantizations_of_others_are_named(method, quantized, tmp_path):
    folder = shutil.copytree(quantized / "own", tmp_path / "q")
    edit_json(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": method}))
    for command in (["dequantize", folder, tmp_path / "d"], ["verify", folder]):
        result = run(*command)
        assert result.exit_code == 1
        assert method in stderr_line(result)
    assert method in run("inspect", folder).stdout
