"""Commands start clean beside a package that warns, logs and prints as transformers imports it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOISE = """
import logging, sys, warnings

logging.getLogger(__name__).warning("noise of %s", __name__)
handler = logging.StreamHandler(sys.stderr)
own = logging.getLogger(__name__ + ".own")
own.addHandler(handler)
own.error("noise of a handler")
warnings.warn("noise of a warning")
"""
MODULES = {
    "__init__": "import torchao.utils",
    "utils": "class TorchAOBaseTensor: pass",
    "prototype/__init__": "",
    "prototype/safetensors/__init__": "",
    "prototype/safetensors/safetensors_support": "flatten_tensor_state_dict = unflatten_tensor_state_dict = None",
    "prototype/safetensors/safetensors_utils": "is_metadata_torchao = None",
    "quantization/__init__": "Int4WeightOnlyConfig = None",
}
VERSION = "0.99.0"


@pytest.fixture
def environment(tmp_path):
    """With a loud package of this name before all others."""
    site = tmp_path / "site"
    for name, code in MODULES.items():
        file = site / "torchao" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{NOISE}\n{code}\n")
    info = site / f"torchao-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchao\nVersion: {VERSION}\n")
    (info / "RECORD").write_text("torchao/__init__.py,,\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _python(environment, *args):
    return subprocess.run([sys.executable, *map(str, args)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["quantize", "verify", "inspect", "generate", "env"])
def test_commands_start_clean(command, environment, make_checkpoint, tmp_path):
    source = make_checkpoint("llama-tied", "bfloat16")
    more = {"quantize": [source, "-o", tmp_path / "q"], "generate": [source, "Hello"], "env": []}.get(command, [source])
    result = _python(environment, "-m", "mxquant.cli.main", command, *more)
    assert "noise" not in result.stderr + result.stdout, result.stderr
    assert result.returncode == 0 or command == "generate"  # which wants a tokenizer


def test_the_package_is_loud_and_only_its_import_is_silenced(environment):
    loud = _python(environment, "-c", "import transformers.quantizers.auto")
    assert "noise of torchao" in loud.stderr
    assert "noise of a handler" in loud.stderr
    assert "noise of a warning" in loud.stderr
    code = """
import logging, warnings
from mxquant.cli import quiet_imports
quiet_imports.install()
quiet_imports.install()
import transformers.quantizers.auto, torchao
assert torchao.__spec__.loader.path == torchao.__file__
logging.getLogger("torchao").warning("heard later")
warnings.warn("and this")
"""
    later = _python(environment, "-c", code)
    assert "noise" not in later.stderr
    assert "heard later" in later.stderr
    assert "and this" in later.stderr
