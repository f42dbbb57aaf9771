"""mypy sees all of the package, and what has types says so to those who install it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("mxquant", "cli", "evals", "kernels")
# One file of each folder, and a line that is wrong only if types are known across folders.
PLANTED = {
    "mxquant/convert/plan.py": 'planted: int = "a"',
    "cli/theory.py": 'planted: int = "a"',
    "evals/sweep/grid.py": 'planted: int = "a"',
    "kernels/cpu/backend.py": 'planted: int = "a"',
    "kernels/triton/launch.py": 'planted: int = "a"',
    "cli/env.py": "from mxquant.evals.gate import parse_share\n\nacross: str = parse_share('5%')",
    "evals/gate.py": "def untyped(x):\n    return x",
}


@pytest.mark.slow
def test_an_error_in_any_folder_fails_the_check_of_types(tmp_path):
    pytest.importorskip("mypy")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("model", "__pycache__", "*.so"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for name, line in PLANTED.items():
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    if (known := ROOT / ".mypy_cache").is_dir():  # what an earlier run found out about torch saves half a minute
        shutil.copytree(known, tmp_path / known.name)
    # -o: nothing is to be installed.
    make = ("make", "types", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed-dev")
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    found = re.findall(r"^build/types/(\S+?):\d+: error:", done.stdout, re.MULTILINE)
    assert sorted(found) == sorted(name if name.startswith("mxquant/") else f"mxquant/{name}" for name in PLANTED)


def test_only_triton_kernels_have_arguments_without_types():
    """pyproject.toml lets kernels/triton/ off; what runs on the host there is annotated all the same."""
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "kernels" / "triton").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (node.returns is None or any(a.annotation is None and a.arg != "self" for a in node.args.args))
    ]
    assert not bare


def test_the_package_says_that_it_has_types():
    assert (ROOT / "mxquant" / "py.typed").is_file()
