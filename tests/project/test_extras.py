"""What runs on ``pip install mxquant`` alone, and what the rest says: which extra it needs, before any work."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mxquant.bundled
from mxquant.errors import CheckpointError, MissingPackageError, MXQuantError
from mxquant.extras import needs

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(mxquant.bundled.path())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What the extras bring, sklearn and pandas with lm-eval.
EXTRAS = ("lm_eval", "datasets", "matplotlib", "scipy", "sklearn", "pandas", "gguf", "peft")


def without(packages: tuple[str, ...], program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that finds no such packages: None in ``sys.modules`` hides them."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    return subprocess.run([sys.executable, "-c", hide + program], capture_output=True, text=True, cwd=cwd, check=False)


def command(*arguments: str) -> str:
    return f"from mxquant.cli.main import main; main({list(arguments)!r})"


REFUSED = {
    "demo draws": (["demo"], "matplotlib", "eval,plot"),
    "demo compares": (["demo"], "scipy", "eval,plot"),
    "theory": (["theory"], "scipy", "theory"),
    "theory draws": (["theory", "--sigma", "1e-4:1", "--plot", "curves.png"], "matplotlib", "plot"),
    "theory draws parts": (["theory", "--sigma", "1e-4:1", "--plot-parts", "parts.svg"], "matplotlib", "plot"),
    "diagnose": (["diagnose", MODEL], "scipy", "theory"),
    "diagnose draws": (["diagnose", MODEL, "--plot", "map.png"], "matplotlib", "plot"),
    "diagnose calibrates": (["diagnose", MODEL, "--calibration", "wikitext2"], "datasets", "eval"),
    "sweep": (["sweep", MODEL, "--text", "builtin"], "scipy", "eval"),
    "sweep draws": (["sweep", MODEL, "--text", "builtin", "--output", "out"], "matplotlib", "plot"),
    "sweep runs tasks": (["sweep", MODEL, "--text", "builtin", "--tasks", "piqa"], "lm_eval", "eval"),
    "eval reads WikiText-2": (["eval", MODEL], "datasets", "eval"),
    "eval compares": (["eval", MODEL, "--baseline", MODEL, "--text", "builtin"], "scipy", "eval"),
    "eval runs tasks": (["eval", MODEL, "--no-perplexity", "--tasks", "piqa"], "lm_eval", "eval"),
    "eval draws": (["eval", MODEL, "--text", "builtin", "--plot", "a.png"], "matplotlib", "plot"),
    "eval reports": (["eval", MODEL, "--text", "builtin", "--report", "a.md"], "matplotlib", "plot"),
    "train": (["train", "--config", MODEL, "--text", "builtin", "--output", "out"], "matplotlib", "plot"),
    "train repeats": (
        ["train", "--config", MODEL, "--text", "builtin", "--seeds", "0,1", "--output", "out"],
        "scipy",
        "eval",
    ),
    "train reads a data set": (
        ["train", "--config", MODEL, "--text", "some/dataset", "--output", "out"],
        "datasets",
        "eval",
    ),
    "train runs tasks": (
        ["train", "--config", MODEL, "--text", "builtin", "--output", "out", "--tasks", "piqa"],
        "lm_eval",
        "eval",
    ),
    "bench draws": (["bench", "--shape", "1,64,64", "--plot", "roofline.png"], "matplotlib", "plot"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "package", "extra"), REFUSED.values(), ids=REFUSED)
def test_a_command_says_which_extra_it_needs(arguments, package, extra, tmp_path):
    done = without((package,), command(*arguments), tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert line.endswith(f"needs the package {package}: pip install 'mxquant[{extra}]'")
    assert not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("package", "extra"), sorted({(package, extra) for _, package, extra in REFUSED.values()}))
def test_the_extra_that_is_named_brings_the_package(package, extra):
    brought = [line for name in extra.split(",") for line in PROJECT["optional-dependencies"][name]]
    assert any(line.startswith(package.replace("_", "-")) for line in brought)


def test_what_quantizes_loads_and_serves_needs_no_extra():
    required = {line.split(">=")[0] for line in PROJECT["dependencies"]}
    assert required == {
        "torch", "transformers", "safetensors", "compressed-tensors", "click", "rich", "PyYAML", "accelerate", "numpy",
        "triton",
    }  # fmt: skip


@pytest.mark.slow
def test_everything_but_studies_runs_without_the_extras(tmp_path):
    program = f"""
from click.testing import CliRunner
from mxquant.cli.main import main

def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.output

run("env")
run("quantize", {MODEL!r}, "--scale", "ue5m3", "--out", "small")
run("inspect", "small")
run("verify", "small")
run("dequantize", "small", "dense")
run("generate", "small", "The", "--max-new-tokens", "4")
run("card", "small")
run("eval", "small", "--text", "builtin", "--windows", "1", "--seq-len", "32")
run("bench", "--shape", "1,64,64", "--explain")
run("sweep", {MODEL!r}, "--dry-run")
run("train", "--config", {MODEL!r}, "--output", "runs", "--dry-run")

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("small")
assert "QuantLinear" in repr(model)

import mxquant
assert mxquant.training.convert(AutoModelForCausalLM.from_pretrained("dense"), "fp4-2d")
assert not [name for name in {EXTRAS!r} if sys.modules[name] is not None]
"""
    done = without(EXTRAS, program, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_theory_says_what_it_needs_from_python_too(tmp_path):
    done = without(("scipy",), "import mxquant; mxquant.theory", tmp_path)
    assert "MissingPackageError: mxquant.theory needs the package scipy: pip install" in done.stderr


def test_needs_names_all_that_is_missing():
    needs("this", "json", "torch", extra="eval")
    with pytest.raises(MissingPackageError, match=r"^this needs the package nopkg: pip install 'mxquant\[eval\]'$"):
        needs("this", "json", "nopkg", extra="eval")
    with pytest.raises(ImportError, match=r"needs the packages nopkg and nowhere: "):
        needs("this", "nopkg", "nowhere", extra="eval")
    with pytest.raises(CheckpointError):
        needs("this", "nopkg", extra="gguf", error=CheckpointError)
    assert issubclass(MissingPackageError, MXQuantError)


def test_python_m_mxquant_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mxquant", "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: mxquant [OPTIONS]")
    version = [sys.executable, "-m", "mxquant", "--version"]
    assert mxquant.__version__ in subprocess.run(version, capture_output=True, text=True, check=True).stdout
