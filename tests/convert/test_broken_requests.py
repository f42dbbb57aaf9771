"""Requests that cannot be met: outputs, full disks, recipes, texts, prompts. One line, and nothing left behind."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from broken_inputs import FIRST, cut, edit_json, folder_in_place_of, repack, run, stderr_line, tree, writes
from broken_quantized import FILE

import mxquant
from mxquant.checkpoint.writer import ShardWriter
from mxquant.cli.common import EXIT_FAILED, EXIT_GATE
from mxquant.inspection.faults import KINDS


@pytest.fixture(scope="session")
def quantized(good_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("requests") / "q"
    mxquant.quantize_model(good_checkpoint, folder, "ue5m3/16")
    return folder


@pytest.fixture
def source(good_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(good_checkpoint, tmp_path / "source"))


# Recipes

RECIPES = {
    "not YAML": ("rules: [a: b: c", "recipe"),
    "empty": ("", "mapping"),
    "a list": ("- a\n- b\n", "list"),
    "a text": ("hello", "mapping"),
    "an unknown key": ("rulez: {}\ndefault: mxfp4\n", "rulez"),
    "a rule that matches nothing": ("rules:\n  - no_such_layer: mxfp4\ndefault: mxfp4\n", "no_such_layer"),
    "a pattern that is no expression": ("rules:\n  - '(': mxfp4\n", "'('"),
    "rules that are a number": ("rules: 7\ndefault: mxfp4\n", "7"),
    "a rule that is a text": ("rules: [q_proj]\ndefault: mxfp4\n", "q_proj"),
    "an unknown scheme": ("default: no-such-scheme\n", "no-such-scheme"),
    "an unknown field": ("default: {scale: ue5m3, colour: red}\n", "colour"),
    "a field that is a number": ("default: {1: 2}\n", "field 1"),
    "a scheme that is a list": ("default: [1]\n", "[1]"),
    "a scale that is a list": ("default: {scale: [e4m3]}\n", "e4m3"),
    "a block of a fraction": ("default: {block: 16.5}\n", "16.5"),
    "a block without end": ("default: {block: 1000000000000}\n", "1000000000000"),
    "a global scale of maybe": ("default: {global_scale: maybe}\n", "maybe"),
    "an unknown rounding": ("default: {rounding: up}\n", "up"),
    "include that is a number": ("default: mxfp4\ninclude: 7\n", "include"),
    "include with numbers": ("default: mxfp4\ninclude: [7]\n", "include"),
    "exclude that is a mapping": ("default: mxfp4\nexclude: {a: b}\n", "exclude"),
    "unknown activations": ("default: mxfp4\nactivations: everything\n", "everything"),
    "a KV cache that is a list": ("default: mxfp4\nkv_cache: [1]\n", "[1]"),
    "everything dense": ("default: dense\n", "nothing would be quantized"),
    "code": ("default: !!python/object/apply:os.mkdir [made-by-yaml]\n", "python/object"),
    "a circle": ("default: &a {scale: *a}\n", "scale"),
    "no end": ("default: " + 400 * "[", "recipe"),
    "a NUL": ("default: mx\0fp4\n", "recipe"),
    "half of a JSON file": ('{"default": "mxfp4"', "recipe"),
    "bytes": (b"\xff\xfe\x00\x01", "not UTF-8"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_make_no_sense(name, good_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, words = RECIPES[name]
    (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = tree(tmp_path)
    result = run("quantize", good_checkpoint, "-o", tmp_path / "out", "--recipe", tmp_path / "mine.yaml")
    assert result.exit_code == 1
    assert words in stderr_line(result)
    assert tree(tmp_path) == before


def test_include_may_be_one_pattern(good_checkpoint, tmp_path):
    (tmp_path / "mine.yaml").write_text("default: mxfp4\ninclude: q_proj\n")
    recipe = mxquant.QuantRecipe.from_file(tmp_path / "mine.yaml")
    assert recipe.decide("model.layers.0.self_attn.q_proj").scheme
    assert not recipe.decide("model.layers.0.self_attn.o_proj").scheme


@pytest.mark.parametrize("path", ["nowhere.yaml", "."])
def test_recipes_that_are_no_files(path, good_checkpoint, tmp_path):
    assert path in stderr_line(run("quantize", good_checkpoint, "-o", tmp_path / "out", "--recipe", path))


# Outputs; {} is a folder with the source in it, a file, and a quantized model

OUTPUTS = {
    "the source": ("{}/source", "same folder"),
    "the source by another name": ("{}/source/../source", "same folder"),
    "the source by a link": ("{}/link", "same folder"),
    "inside the source": ("{}/source/sub/out", "lie in one another"),
    "around the source": ("{}", "lie in one another"),
    "the root of all": ("/", "lie in one another"),
    "a file": ("{}/file", "not a folder"),
    "under a file": ("{}/file/out", "Not a directory"),
    "a device": ("/dev/null", "not a folder"),
    "where nothing can be made": ("/proc/out", "/proc/out"),
    "another model": ("{}/q", "--overwrite"),
    "a folder of something else": ("{}/other", "not empty"),
    "a name that is too long": ("{}/" + 300 * "x", "too long"),
    "a name that leaves no room": ("{}/" + 250 * "x", "too long"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_cannot_be_written(name, source, quantized, tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("precious")
    (tmp_path / "link").symlink_to("source")
    shutil.copytree(quantized, tmp_path / "q")
    path, words = OUTPUTS[name]
    before = tree(tmp_path)
    result = run("quantize", source, "-o", path.format(tmp_path))
    assert result.exit_code == 1
    assert words in stderr_line(result)
    if name != "another model":  # what is no model is not overwritten either
        assert run("quantize", source, "-o", path.format(tmp_path), "--overwrite").exit_code == 1
    assert tree(tmp_path) == before


def test_a_folder_in_which_nothing_may_be_made(source, tmp_path, monkeypatch):
    """Tests may run as root, whom no mode of a folder stops."""
    real = Path.mkdir

    def guarded(path, *args, **kwargs):
        if path.is_relative_to(tmp_path / "forbidden"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", guarded)
    result = run("quantize", source, "-o", tmp_path / "forbidden" / "out")
    line = stderr_line(result)
    assert str(tmp_path / "forbidden" / "out") in line
    assert "Permission denied" in line


# Full disks

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
@pytest.mark.parametrize("when", ["a shard is begun", "a shard is written", "the last file is written"])
def test_a_disk_that_gets_full(when, command, source, quantized, tmp_path, monkeypatch):
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        if when == "a shard is begun":
            patch.setattr(os, "posix_fallocate", _raises(FULL))
        elif when == "a shard is written":
            patch.setattr(ShardWriter, "write", _raises(FULL))
        else:
            patch.setattr(Path, "write_text", _raises(FULL))
        out = tmp_path / "deep" / "out"
        result = run("quantize", source, "-o", out) if command == "quantize" else run("dequantize", quantized, out)
    assert result.exit_code == 1
    assert stderr_line(result) == f"Error: cannot write {out}: No space left on device"
    assert tree(tmp_path) == before


def _raises(error: Exception):
    def function(*args, **kwargs):
        raise error

    return function


def test_an_old_output_survives_a_full_disk(source, quantized, tmp_path, monkeypatch):
    shutil.copytree(quantized, tmp_path / "out")
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", _raises(FULL))
        assert run("quantize", source, "-o", tmp_path / "out", "--overwrite").exit_code == 1
    assert tree(tmp_path) == before


# Other arguments

ARGUMENTS = {
    "a source that is not there": (["quantize", "./nowhere"], "./nowhere", 1),
    "a source that is a file": (["quantize", f"{{source}}/{FIRST}"], "is a file", 1),
    "a source that is an address": (["quantize", "https://example.com/a/b"], "https://example.com/a/b", 1),
    "a source of a user that there is not": (["quantize", "~no-such-user/model"], "~no-such-user", 1),
    "a source with a name that is too long": (["quantize", 300 * "x"], "too long", 1),
    "a revision of a folder": (["quantize", "{source}", "--revision", "v2"], "v2", 1),
    "a revision of a file": (["quantize", "./some.gguf", "--revision", "v2"], "v2", 1),
    "a shard size without end": (["quantize", "{source}", "--max-shard-size", "inf"], "inf", 2),
    "a device without numbers": (["quantize", "{source}", "--device", "meta"], "meta", 1),
    "a device that does not exist": (["quantize", "{source}", "--device", "abacus"], "abacus", 1),
    "a block without end": (["quantize", "{source}", "--block", "1000000000000"], "1000000000000", 1),
    "unknown activations": (["quantize", "{source}", "--activations", "some"], "some", 1),
    "everything excluded": (["quantize", "{source}", "--exclude", "."], "nothing would be quantized", 1),
    "an output without a name": (["quantize", "{source}", "-o", "."], "output . has no name", 1),
    "dequantizing nothing": (["dequantize", "./nowhere", "d"], "./nowhere", 1),
    "dequantizing a dense model": (["dequantize", "{source}", "d"], "not quantized", 1),
    "dequantizing into the source": (["dequantize", "{q}", "{q}"], "same folder", 1),
    "inspecting nothing": (["inspect", "./nowhere"], "./nowhere", 1),
    "inspecting a tensor that is not there": (["inspect", "{q}", "lm_haed"], "lm_head", 1),
    "verifying nothing": (["verify", "./nowhere"], "./nowhere", 1),
    "verifying against nothing": (["verify", "{q}", "--source", "./nowhere"], "./nowhere", 1),
    "verifying against a quantized model": (["verify", "{q}", "--source", "{q}"], "quantized itself", 1),
    "generating from nothing": (["generate", "./nowhere", "hello"], "./nowhere", 1),
    "an empty prompt": (["generate", "{q}", ""], "no tokens", 1),
    "a prompt that is too long": (["generate", "{q}", 100 * "x"], "supports only 64", 1),
    "a prompt that is no text": (["generate", "{q}", "\ud800"], "cannot take the prompt", 1),
    "a temperature of NaN": (["generate", "{q}", "hello", "--temperature", "nan"], "nan", 2),
    "a temperature close to nothing": (["generate", "{q}", "hello", "--temperature", "1e-40"], "1e-40", 2),
    "evaluating nothing": (["eval", "./nowhere", "--text", "builtin"], "./nowhere", 1),
    "a text that is not there": (["eval", "{q}", "--text", "nowhere.txt"], "nowhere.txt", 1),
    "a text that is a folder": (["eval", "{q}", "--text", "."], "Is a directory", 1),
    "a text that is empty": (["eval", "{q}", "--text", "/dev/null"], "/dev/null", 1),
    "a text that is no text": (["eval", "{q}", "--text", f"{{source}}/{FIRST}"], "not UTF-8", 1),
    "a text that is too short": (["eval", "{q}", "--text", "{source}/LICENSE"], "fewer than one window", 1),
    "windows longer than the model's": (["eval", "{q}", "--text", "builtin", "--seq-len", "999"], "999", 1),
    "results in a folder that is not there": (["eval", "{q}", "--output", "no/where.json"], "no/where.json", 2),
    "a baseline that is not there": (["eval", "{q}", "--text", "builtin", "--baseline", "./nowhere"], "./nowhere", 1),
    "no tasks": (["eval", "{q}", "--tasks", ",", "--no-perplexity"], "no tasks", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_make_no_sense(name, good_checkpoint, quantized, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, words, code = ARGUMENTS[name]
    args = [arg.format(source=good_checkpoint, q=quantized) for arg in args]
    result = run(*args, *(["-o", "out"] if args[0] == "quantize" and "-o" not in args else []))
    assert result.exit_code == code, result.output
    line = stderr_line(result) if code == 1 else result.stderr.splitlines()[-1]
    assert words in line
    assert not tree(tmp_path)


def test_results_that_do_not_fit_on_the_disk_name_the_file(quantized):
    result = run("eval", quantized, "--text", "builtin", "--windows", "1", "--output", "/dev/full")
    assert result.exit_code == 1
    assert stderr_line(result) == "Error: /dev/full: No space left on device"


# What a model needs beside its weights


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


BESIDE = {
    "no tokenizer": (_without_tokenizer, "has no tokenizer"),
    "half a tokenizer": (cut("tokenizer.json", 100), "tokenizer"),
    "a tokenizer that is a list": (writes("tokenizer.json", "[]"), "tokenizer"),
    "a tokenizer's config that is not JSON": (writes("tokenizer_config.json", "{"), "tokenizer"),
    "a tokenizer of another model": (
        lambda f: edit_json(f / "tokenizer.json", lambda d: d["model"]["vocab"].update(h=300)), "token 300"
    ),
    "a chat template that cannot be read": (writes("chat_template.jinja", "{% for m in %}"), "chat template"),
    "a chat template that refuses": (writes("chat_template.jinja", "{{ raise_exception('no') }}"), "chat template"),
    "an end that is no token": (writes("generation_config.json", '{"eos_token_id": "end"}'), "generation_config.json"),
    "a config that is a folder": (folder_in_place_of("config.json"), "config.json"),
    "a config with words for a number": (
        lambda f: edit_json(f / "config.json", lambda d: d.update(hidden_size="x")), "hidden_size"
    ),
    "a norm of another shape": (
        lambda f: repack(f, lambda t: t.update({"model.norm.weight": ("BF16", [1], b"\0\0")}), FILE),
        "model.norm.weight is [1] in the files, but the model's is [32]",
    ),
    "a norm of NaN": (
        lambda f: repack(f, lambda t: t.update({"model.norm.weight": ("BF16", [32], 32 * b"\xc0\x7f")}), FILE), "NaN"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_models_that_cannot_generate(name, quantized, tmp_path):
    folder = Path(shutil.copytree(quantized, tmp_path / "q"))
    breaks, words = BESIDE[name]
    breaks(folder)
    result = run("generate", folder, "hello", "--max-new-tokens", "2", "--json")
    assert result.exit_code == 1
    line = stderr_line(result)
    assert words in line
    assert str(folder) in line
    assert not result.stdout


# The same in processes of their own, as a user sees it


def _shell(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    code = "from mxquant.cli.main import main; main()"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_a_disk_with_a_limit(source, tmp_path):
    """Files may not grow past 20 kB, which a shard would: the kernel refuses, nobody pretends."""
    before = tree(tmp_path)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = _shell("quantize", source, "-o", tmp_path / "out", preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == f"Error: cannot write a temporary file in {tempfile.gettempdir()}: File too large\n"
    assert tree(tmp_path) == before


def test_a_broken_file_seen_from_a_shell(quantized, tmp_path):
    folder = Path(shutil.copytree(quantized, tmp_path / "q"))
    cut(FILE, -1)(folder)
    done = _shell("generate", folder, "hello")
    assert done.returncode == 1
    assert FILE in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_standard_output_that_is_full(quantized, monkeypatch):
    monkeypatch.setattr("mxquant.cli.inspect_tables.print_inspection", _raises(FULL))
    result = run("inspect", quantized)
    assert result.exit_code == 1
    assert stderr_line(result) == "Error: cannot write the output: No space left on device"


def test_an_interrupt_has_an_exit_code_of_its_own(source, tmp_path, monkeypatch):
    before = tree(tmp_path)
    monkeypatch.setattr(ShardWriter, "write", _raises(KeyboardInterrupt()))
    result = run("quantize", source, "-o", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"
    assert tree(tmp_path) == before


def test_the_exit_codes_of_the_documentation_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    listed = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}
    verify = {code for code, meaning in listed.items() if meaning.startswith("`verify`")}
    assert verify == {kind.code for kind in KINDS.values()}
    assert set(listed) - verify == {0, EXIT_FAILED, 2, EXIT_GATE, 130}


def test_standard_input_that_is_no_text(quantized):
    from click.testing import CliRunner

    from mxquant.cli.main import main

    result = CliRunner().invoke(main, ["generate", str(quantized), "-"], input=b"\xff\xfe")
    assert result.exit_code == 1
    assert "not UTF-8" in stderr_line(result)
