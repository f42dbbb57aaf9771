"""Compiling the library: one compiler run for each source and instruction level, then one link.

Used by setup.py when the package is built and installed; needs no more than a C++17 compiler. The
library has a plain C interface and links neither Python nor PyTorch, so one binary serves them all.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "_native.so"
SOURCES = Path(__file__).parent / "src"

_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
    # Results are bit for bit those of the reference: no product is fused with a sum unless the code says so.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mpopcnt"]
# GCC 12 warns about uninitialized variables of its own <avx512fintrin.h>.
_QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "bf16")), *_QUIET]


def find_compiler() -> str | None:
    """``$CXX``, or the first C++ compiler on the path."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        if shutil.which(shlex.split(name)[0]):
            return name
    return None


def units() -> list[tuple[str, list[str]]]:
    """Sources and the flags each is compiled with; ``level.cpp`` once for each instruction level."""
    levels = [("level.cpp", ["-DMXQ_LEVEL=0"])]
    common: list[str] = []
    if platform.machine().lower() in ("x86_64", "amd64"):
        common = ["-DMXQ_X86"]
        levels += [("level.cpp", ["-DMXQ_LEVEL=1", *_AVX2]), ("level.cpp", ["-DMXQ_LEVEL=2", *_AVX512])]
    return [(name, common) for name in ("api.cpp", "parallel.cpp", "tables.cpp")] + levels


def build(output: Path, work: Path, extra: list[str] | None = None) -> None:
    """Compile to ``output``, objects in ``work``; ``extra`` flags go to compiler and linker.

    Raises ``RuntimeError`` with the compiler's own words if it cannot be done.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found (set CXX to name one)")
    work.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [*shlex.split(compiler), *(extra or [])]

    def compile_unit(unit: tuple[int, tuple[str, list[str]]]) -> str:
        number, (source, flags) = unit
        target = str(work / f"{number}.o")
        _run([*command, *_FLAGS, *(extra or []), *flags, "-c", str(SOURCES / source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_unit, enumerate(units())))
    # A new file takes the old one's place at once: a process that has it open keeps the old one.
    temporary = output.with_suffix(".tmp")
    _run([*command, "-shared", "-pthread", *objects, "-ldl", "-o", str(temporary)])
    os.replace(temporary, output)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error}") from error
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[1]).parent / "objects", sys.argv[2:])
