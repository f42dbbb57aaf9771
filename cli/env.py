"""``mxquant env``."""

from __future__ import annotations

import platform
from typing import Any

import click

from mxquant.cli.common import handle_errors, write_json

_EPILOG = """\b
Examples:
  mxquant env
  mxquant env --json
"""

_PACKAGES = ("torch", "transformers", "safetensors", "compressed-tensors", "triton", "lm-eval")
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vbmi", "avx512_bf16", "amx_bf16")
# Measured on two cores with AVX-512 (benchmarks/cpu_kernels.py).
_COST = {
    None: "quantizing and packed layers run in plain PyTorch: 10 to 100 times slower, packed layers slower than dense",
    "portable": "packed layers are slower than dense ones: the processor has no vectors that the kernels know",
    "avx2": "packed layers are slower than dense bf16 from 4 rows of activations on: bf16 products need AVX-512",
    "avx512": None,
}


@click.command("env", epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@handle_errors
def env_command(as_json: bool) -> None:
    """Show versions, the processor, which kernels are used, what is missing and what that costs."""
    found = describe()
    if as_json:
        write_json(found)
        return
    kernels = found["cpu_kernels"]
    for name, version in found["versions"].items():
        click.echo(f"{name:20} {version or 'not installed'}")
    click.echo(f"{'processor':20} {found['processor']}")
    click.echo(f"{'features':20} {' '.join(found['features']) or 'none that matter here'}")
    click.echo(f"{'threads':20} {found['threads']}")
    click.echo(f"{'GPU':20} {found['gpu'] or 'none'}")
    click.echo(f"{'CPU kernels':20} {kernels['library'] or 'none'}")
    click.echo(
        f"{'  level':20} {kernels['level'] or 'reference'}" + (f" of {kernels['best']}" if kernels["best"] else "")
    )
    for label in ("missing", "cost", "cure"):
        if kernels[label]:
            click.echo(f"{'  ' + label:20} {kernels[label]}")


def describe() -> dict[str, Any]:
    """Everything that ``mxquant env`` prints, ready for JSON."""
    import torch

    names = ("python", "mxquant", *_PACKAGES)
    return {
        "versions": {name: _version(name) for name in names},
        "processor": _processor(),
        "features": _features(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_kernels": _cpu_kernels(),
    }


def _cpu_kernels() -> dict[str, str | None]:
    from mxquant.kernels.cpu import build, library
    from mxquant.ops.backends import backend

    loaded = library.load()
    if isinstance(loaded, str):
        compiler = build.find_compiler()
        cure = (
            f"install mxquant again: a compiler is there now ({compiler})"
            if compiler
            else "install a C++ compiler (Debian: apt install g++), then mxquant again"
        )
        found = str(library.PATH) if library.PATH.exists() else None
        return {"library": found, "level": None, "best": None, "missing": loaded, "cost": _COST[None], "cure": cure}
    level: str | None = library.level()
    missing = None
    if backend("cpu") is None:
        level, missing = None, "MXQUANT_KERNELS=reference turns the kernels off"
    elif level != library.best_level():
        missing = "MXQUANT_CPU asks for less than this processor can do"
    path, best = str(library.PATH), library.best_level()
    return {"library": path, "level": level, "best": best, "missing": missing, "cost": _COST[level], "cure": None}


def _version(name: str) -> str | None:
    import importlib.metadata

    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            lines = [line.partition(":") for line in info]
    except OSError:
        return ""
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _features() -> list[str]:
    flags = set(_cpuinfo("flags").split())
    return [name for name in _FEATURES if name in flags]
