"""The compiled library: finding it, its structures (see src/mxq.h) and its instruction level.

``MXQUANT_CPU=avx512|avx2|portable`` forces a level, for tests and for comparing;
``MXQUANT_CPU_LIBRARY`` names another library to load, such as one built with sanitizers, or none at
all if there is no such file.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from mxquant.kernels.cpu.build import NAME

CHOSEN = os.environ.get("MXQUANT_CPU_LIBRARY")
PATH = Path(CHOSEN or Path(__file__).with_name(NAME))
LEVELS = ("portable", "avx2", "avx512")
OK, BAD_ARGUMENT, NOT_FINITE, NO_MEMORY, NO_SUCH_LEVEL = range(5)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Sizes of tables in bytes.
QUANT_TABLES, DECODE_TABLE = 256 * (8 * 2 + 8 * 4 + 3 * 4), 256 * 16 * (4 + 2 + 1 + 1)


class ScaleFormat(ctypes.Structure):
    _fields_ = (("mantissa_bits", c_int32), ("bias", c_int32), ("max_code", c_int32), ("global_scale", c_float))


class QuantJob(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("rows", c_int64), ("columns", c_int64), ("stride", c_int64),
        ("dtype", c_int32), ("block_rows", c_int32), ("block_columns", c_int32),
        ("rule", c_int32), ("carry", c_int32), ("largest", c_int32),
        ("format", ScaleFormat), ("tables", c_void_p),
        ("stochastic", c_int32), ("with_stats", c_int32), ("threads", c_int32),
        ("tries", c_int32), ("offsets", c_float * 16),
        ("key", c_uint64), ("first_row", c_int64), ("packed", c_void_p), ("scale", c_void_p),
        ("bad_row", c_int64), ("zero_scales", c_int64), ("subnormal_scales", c_int64), ("saturated", c_int64),
        ("error", c_double), ("signal", c_double),
    )  # fmt: skip


class DequantJob(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p), ("scale", c_void_p), ("rows", c_int64), ("columns", c_int64),
        ("dtype", c_int32), ("bits", c_int32), ("block_rows", c_int32), ("block_columns", c_int32),
        ("format", ScaleFormat), ("table", c_void_p), ("elements", c_void_p), ("out", c_void_p),
        ("threads", c_int32), ("reserved", c_int32),
    )  # fmt: skip


class LinearWeight(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p), ("scale", c_void_p), ("table", c_void_p), ("bias", c_void_p),
        ("global_scale", c_void_p), ("n", c_int64), ("k", c_int64),
        ("bias_dtype", c_int32), ("block_rows", c_int32), ("block_columns", c_int32), ("reserved", c_int32),
        ("format", ScaleFormat),
    )  # fmt: skip


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library, ready to be called, or the reason why there is none."""
    if not PATH.exists():
        if CHOSEN:
            return f"MXQUANT_CPU_LIBRARY is {CHOSEN}, which is no file"
        return f"{PATH.name} was not built (no C++ compiler when mxquant was installed?)"
    try:
        lib = ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"{PATH.name} cannot be loaded: {error}"
    sizes = (c_int64 * 6)()
    lib.mxq_sizes(sizes)
    structures = (QuantJob, DequantJob, LinearWeight)
    expected = [*map(ctypes.sizeof, structures), QUANT_TABLES, DECODE_TABLE, ctypes.sizeof(ScaleFormat)]
    if list(sizes) != expected:
        return f"{PATH.name} belongs to another version of mxquant; install mxquant again"
    for name, arguments in (
        ("mxq_quant_tables", (POINTER(ScaleFormat), c_int32, c_void_p)),
        ("mxq_decode_table", (POINTER(ScaleFormat), c_int32, c_void_p)),
        ("mxq_quantize", (POINTER(QuantJob),)),
        ("mxq_dequantize", (POINTER(DequantJob),)),
        ("mxq_linear", (c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32)),
        ("mxq_set_level", (c_int32,)),
    ):
        getattr(lib, name).argtypes = arguments
    lib.mxq_multiply.argtypes, lib.mxq_multiply.restype = (c_int32, c_int64, c_int32), c_double
    wanted = os.environ.get("MXQUANT_CPU")
    if wanted and (wanted not in LEVELS or lib.mxq_set_level(LEVELS.index(wanted)) != OK):
        return f"MXQUANT_CPU={wanted}: not one of {', '.join(LEVELS)}, or not a level of this processor"
    return lib


def library() -> ctypes.CDLL:
    """The library; only where :func:`load` gives one."""
    lib = load()
    assert not isinstance(lib, str), lib
    return lib


def level() -> str:
    """The instruction level in use."""
    return LEVELS[library().mxq_level()]


def best_level() -> str:
    """The best instruction level of this processor."""
    return LEVELS[library().mxq_best_level()]


def set_level(name: str) -> None:
    """Use another instruction level from now on."""
    check(library().mxq_set_level(LEVELS.index(name)))


def check(status: int) -> None:
    """Raise what a status of the library means."""
    if status == NO_MEMORY:
        raise MemoryError("not enough memory for a kernel's buffers")
    if status != OK:
        raise RuntimeError(f"a kernel refused its arguments (status {status}): this is a bug of mxquant")


def table(function: str, fmt: ScaleFormat, dtype: torch.dtype, size: int) -> torch.Tensor:
    """A table made by ``function``, at a cache line's border."""
    memory = torch.empty(size + 64, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % 64 :][:size]
    check(getattr(library(), function)(fmt, DTYPES[dtype], aligned.data_ptr()))
    return aligned


def product_instruction(dtype: torch.dtype) -> str:
    """What linear multiplies activations of ``dtype`` with."""
    if level() == "portable":
        return "products and sums of C++"
    return "vdpbf16ps" if level() == "avx512" and dtype == torch.bfloat16 else "vfmadd"


def peak_flops(dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Operations a second that :func:`product_instruction` reaches on registers alone."""
    threads, rounds, best, end = torch.get_num_threads(), 20_000, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or best == 0:
        start = time.perf_counter()
        operations = library().mxq_multiply(DTYPES[dtype], rounds, threads)
        best = max(best, operations / (time.perf_counter() - start))
    return best
