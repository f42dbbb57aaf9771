"""Builds the CPU kernels with AddressSanitizer and UBSan and runs their tests on that library.

python tests/sanitize_kernels.py [pytest arguments]
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from mxquant.kernels.cpu import build

FLAGS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
# These fork, compile, or are about PyTorch only.
LEFT_OUT = "not (forked or compiled or checks_of_torch or gradients or threshold or amax)"
HERE = Path(__file__).parent


def runtime(compiler: str, name: str) -> str:
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    compiler = build.find_compiler()
    if compiler is None:
        print("no C++ compiler", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / build.NAME
        build.build(library, Path(folder) / "objects", FLAGS)
        environment = {
            **os.environ,
            "MXQUANT_CPU_LIBRARY": str(library),
            # The runtime has to be there before Python allocates anything; the C++ library for its exceptions.
            "LD_PRELOAD": ":".join(runtime(compiler, n) for n in ("libasan.so", "libubsan.so", "libstdc++.so.6")),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        tests = [str(HERE / "kernels" / f"test_cpu_{part}.py") for part in ("fuzz", "linear", "quantize")]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-k", LEFT_OUT, *tests]
        return subprocess.run([*command, *sys.argv[1:]], env=environment, cwd=HERE.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
