"""Runs the tests that touch transformers with several versions of it: ``python tests/compat.py 5.17.0 newest``.

Each version gets an environment of its own on top of the one that runs this, with only what differs
installed in it; they are kept and used again. ``--pip-args`` go to pip, what follows ``--`` to pytest.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "architectures",
    "architecture_details",
    "autoload",
    "cli_quantize",
    "compressed_tensors_output",
    "experts",
    "generate",
    "loading",
    "offload",
    "peft",
    "pipeline",
    "side_files",
    "sources",
    "training_conversion",
    "training_run",
)
NEWEST = "newest"


def environment(version: str, pip_args: list[str]) -> Path:
    """The interpreter of an environment with that version of transformers."""
    folder = Path(f"{sys.prefix}-transformers-{version}")
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        venv.create(folder, symlinks=sys.platform != "win32")
        base = sysconfig.get_path("purelib")
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (packages / "base_environment.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    wanted = ["--upgrade", "transformers<6"] if version == NEWEST else [f"transformers=={version}"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *pip_args, *wanted], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help=f"a version of transformers, or {NEWEST!r}")
    parser.add_argument("--pip-args", default="", help="arguments for pip, as one string")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, pytest_args = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    files = [str(path) for name in TESTS for path in sorted((ROOT / "tests").rglob(f"test_{name}.py"))]
    failed = []
    for version in options.versions:
        python = environment(version, shlex.split(options.pip_args))
        found = [python, "-c", "import transformers; print(transformers.__version__)"]
        exact = subprocess.run(found, check=True, capture_output=True, text=True).stdout.strip()
        print(f"transformers {exact} ({python.parent.parent})", flush=True)
        if subprocess.run([python, "-m", "pytest", *files, *pytest_args], cwd=ROOT, check=False).returncode:
            failed.append(exact)
    print(f"failed with transformers {', '.join(failed)}" if failed else "passed with every version")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
