"""What a kernel became for a chip that need not be here: registers, spills, instructions, occupancy.

NVIDIA figures are read from the disassembled cubin (with the ``cuobjdump`` that Triton carries), AMD ones
from the assembly that the compiler writes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from mxquant.kernels.triton.launch import Launch


@dataclass(frozen=True)
class Chip:
    """A compile target and what one of its multiprocessors (compute units) has room for.

    ``shared``: bytes of shared memory (LDS) a program may use. ``registers``: for NVIDIA 32-bit registers
    of a multiprocessor; for AMD vector registers of a lane.
    """

    target: GPUTarget
    shared: int
    shared_total: int
    registers: int
    warps: int


# CUDA C++ Programming Guide, table of technical specifications by compute capability; AMD CDNA 3 and
# CDNA 4 instruction set architecture guides (waves and registers are those of one SIMD of four).
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 << 10, 164 << 10, 65536, 64),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 << 10, 228 << 10, 65536, 64),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 227 << 10, 228 << 10, 65536, 64),
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 99 << 10, 100 << 10, 65536, 48),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 << 10, 64 << 10, 512, 8),
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), 160 << 10, 160 << 10, 512, 8),
}


@dataclass(frozen=True)
class Figures:
    """One kernel on one chip.

    registers : a thread's, vector registers on AMD (accumulation registers included).
    spills : instructions that store registers to memory or load them back (NVIDIA), spilled registers (AMD).
    shared : bytes of shared memory of one program, as compiled.
    instructions : in the innermost loop, or the whole kernel where there is none.
    per_weight : those instructions, times threads, by the weights that one pass handles.
    matrix : matrix instructions by name. loads : global loads by width in bytes.
    packed_load : bytes of packed weight that a thread loads at a time; 0 where none is loaded.
    approximate_divisions : ``div.full`` and its like in the PTX.
    occupancy : share of a multiprocessor's warps that registers and shared memory leave room for.
    """

    registers: int
    spills: int
    shared: int
    instructions: int
    per_weight: float
    matrix: dict[str, int]
    loads: dict[int, int]
    packed_load: int
    approximate_divisions: int
    occupancy: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(launch: Launch, chip: Chip) -> Figures:
    """Compile a launch for a chip and read off what it became."""
    kernel = launch.compile(chip.target)
    nvidia = chip.target.backend == "cuda"
    registers, spills, body, code = _sass(kernel.asm["cubin"]) if nvidia else _amdgcn(kernel.asm["amdgcn"])
    weights = launch.constants.get("TILE_N", 0) * launch.constants.get("TILE_K", 0)
    shared = kernel.metadata.shared
    return Figures(
        registers,
        spills,
        shared,
        len(body),
        round(len(body) * launch.threads / weights, 2) if weights else 0.0,
        dict(Counter(m for m in code if re.match(r"HMMA|HGMMA|UTC\w*MMA|OMMA|QMMA|IMMA|v_s?mfma", m))),
        dict(sorted(Counter(filter(None, map(_width, code))).items())),
        _packed_load(kernel.asm["ttgir"], launch),
        len(re.findall(r"div\.(?:full|approx)|rcp\.approx", kernel.asm["ptx"])) if nvidia else 0,
        _occupancy(chip, registers, shared, launch.threads // chip.target.warp_size),
    )


def _sass(cubin: bytes) -> tuple[int, int, list[str], list[str]]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "-sass", "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = int(re.findall(r"REG:(\d+)", text)[0])
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)([^;]*);", text, re.M)
    code = [name for _, name, _ in lines]
    spills = sum(name.startswith(("LDL", "STL")) for name in code)
    # The innermost of the longest: a loop is a branch back; nested ones are those inside another.
    addresses = [int(address, 16) for address, _, _ in lines]
    loops = []
    for at, (_, name, rest) in zip(addresses, lines, strict=True):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    return registers, spills, _body(code, addresses, loops), code


def _amdgcn(text: str) -> tuple[int, int, list[str], list[str]]:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

    code, labels, loops = [], {}, []
    for line in text.split(".section")[0].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+([a-z]+_\w+)(.*)", line):
            branch = re.search(r"(\.LBB\w+)", found[2])
            if found[1].startswith(("s_cbranch", "s_branch")) and branch and branch[1] in labels:
                loops.append((labels[branch[1]], len(code)))
            code.append(found[1])
    body = _body(code, list(range(len(code))), loops)
    return number("vgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count"), body, code


def _body(code: list[str], addresses: list[int], loops: list[tuple[int, int]]) -> list[str]:
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, addresses[-1]))
    body = [name for at, name in zip(addresses, code, strict=True) if first <= at <= last]
    return [name for name in body if name not in ("NOP", "s_nop")]


def _width(name: str) -> int | None:
    """Bytes that a global load (or copy to shared memory) brings each thread."""
    if name.startswith(("LDG", "LDGSTS")):
        bits = re.search(r"\.[US]?(8|16|32|64|128|256)\b", name)
        return int(bits[1]) // 8 if bits else 4
    if found := re.match(r"(?:global|buffer)_load_(?:lds_)?(\w+)", name):
        return {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short_d16": 2}.get(found[1], 1)
    return None


def _packed_load(ttgir: str, launch: Launch) -> int:
    """From the layout of the tile of packed bytes (or 32-bit words): both are told by their shapes."""
    packed = launch.arguments.get("packed_ptr")
    if packed is None or "key_low" in launch.arguments:  # quantize writes it
        return 0
    size = packed.element_size()
    columns = launch.constants["TILE_K"] // 2 // size
    tile = rf"(?:load|copy).*tensor<{launch.constants['TILE_N']}x{columns}x!tt\.ptr<i{8 * size}>, (#\w+)>"
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\]", ttgir, re.M))
    found = [min(16, size * int(layouts[name])) for name in re.findall(tile, ttgir) if name in layouts]
    return min(found, default=0)


def _occupancy(chip: Chip, registers: int, shared: int, warps: int) -> float:
    if chip.target.backend == "cuda":
        by_registers = chip.registers // (-(-registers // 8) * 8 * 32) // warps
        by_shared = chip.shared_total // (shared + 1024)
        return round(min(by_registers, by_shared, chip.warps // warps) * warps / chip.warps, 2)
    # Four SIMDs share the LDS; a program's waves spread over them.
    by_registers = min(chip.warps, chip.registers // max(8, -(-registers // 8) * 8)) * 4 // warps
    by_shared = chip.shared_total // max(shared, 1)
    return round(min(by_registers, by_shared, 4 * chip.warps // warps) * warps / (4 * chip.warps), 2)
