"""Random arguments and bytes at the C interface: an error code or a result, nothing written outside.

``MXQUANT_FUZZ_SECONDS`` makes it run longer; ``make sanitize`` runs it under AddressSanitizer, which
sees reads outside as well.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import time

import pytest
import torch

L = pytest.importorskip("mxquant.kernels.cpu.library")
if isinstance(L.load(), str):
    pytest.skip(L.load(), allow_module_level=True)

SECONDS = float(os.environ.get("MXQUANT_FUZZ_SECONDS", "2"))
GUARD = 64
# mantissa bits, bias, largest code
FORMATS = [(0, 127, 254), (3, 7, 126), (3, 15, 254), (3, 15, 247)]
LEVELS = L.LEVELS[: L.LEVELS.index(L.best_level()) + 1]


class Output:
    """Memory of ``size`` bytes, aligned to one item only, with bytes around it that must not change."""

    def __init__(self, size: int):
        self.memory = torch.full((size + 2 * GUARD + 4,), 0xA5, dtype=torch.uint8)
        self.pointer = self.memory.data_ptr() + GUARD + 4
        self.end = GUARD + 4 + size

    def assert_untouched_around(self) -> None:
        assert (self.memory[: GUARD + 4] == 0xA5).all()
        assert (self.memory[self.end :] == 0xA5).all()


def random_bytes(rng: random.Random, count: int) -> torch.Tensor:
    """Exactly that many bytes, so that a sanitizer sees a read past their end."""
    return torch.frombuffer(bytearray(rng.randbytes(max(1, count))), dtype=torch.uint8)


def weights(rng: random.Random, dtype: int, count: int) -> torch.Tensor:
    raw = random_bytes(rng, count * (4 if dtype == 0 else 2))
    if rng.random() < 0.3:
        return raw  # whatever they are, NaN among them
    kind = (torch.float32, torch.bfloat16, torch.float16)[dtype]
    scale = 2.0 ** rng.uniform(-30, 10)
    values = torch.randn(count, generator=torch.Generator().manual_seed(rng.getrandbits(32))) * scale
    return values.to(kind).view(torch.uint8)


def shape(rng: random.Random) -> tuple[int, int]:
    return rng.choice((1, 2, 5, rng.randint(1, 70))), rng.choice((1, 8, 16, 33, 64, rng.randint(1, 2300)))


def block(rng: random.Random) -> tuple[int, int]:
    return rng.choice((1, 1, 1, 3, 16)), rng.choice((8, 16, 32, 64, 128, 256, 1024))


def scale_format(rng: random.Random, power: bool | None = None) -> L.ScaleFormat:
    formats = FORMATS if power is None else FORMATS[:1] if power else FORMATS[1:]
    g = rng.choice((0.0, 0.0, 1.0, 2.0 ** rng.uniform(-120, 120)))
    return L.ScaleFormat(*rng.choice(formats), g)


def blocks_of(rows: int, columns: int, r: int, c: int) -> int:
    return math.ceil(rows / r) * math.ceil(columns / c)


def fuzz_quantize(rng: random.Random) -> None:
    (rows, columns), (r, c), dtype, rule = shape(rng), block(rng), rng.randrange(3), rng.randrange(8)
    fmt = scale_format(rng, rule >= 5)
    kind = (torch.float32, torch.bfloat16, torch.float16)[dtype]
    tables = L.table("mxq_quant_tables", fmt, kind, L.QUANT_TABLES)
    x = weights(rng, dtype, rows * columns)
    packed, scale = Output(rows * ((columns + 1) // 2)), Output(blocks_of(rows, columns, r, c))
    offsets = [rng.randint(-8, 8) for _ in range(rng.randint(1, 16))]
    job = L.QuantJob(
        x=x.data_ptr(), rows=rows, columns=columns, stride=columns, dtype=dtype, block_rows=r, block_columns=c,
        rule=rule, carry=rng.choice((0, 0x7FFFFF, 1 << 21)), largest=252, format=fmt, tables=tables.data_ptr(),
        stochastic=rng.randrange(2), with_stats=rng.randrange(2), threads=rng.choice((1, 2)),
        tries=len(offsets), offsets=(ctypes.c_float * 16)(*offsets), key=rng.getrandbits(64),
        first_row=rng.choice((0, rng.randrange(1 << 30))), packed=packed.pointer, scale=scale.pointer,
    )  # fmt: skip
    assert L.library().mxq_quantize(ctypes.byref(job)) in (L.OK, L.NOT_FINITE)
    assert -1 <= job.bad_row < rows
    packed.assert_untouched_around()
    scale.assert_untouched_around()


def fuzz_dequantize(rng: random.Random) -> None:
    (rows, columns), (r, c), dtype, bits = shape(rng), block(rng), rng.randrange(3), rng.choice((4, 4, 6, 8))
    fmt = scale_format(rng)
    kind = (torch.float32, torch.bfloat16, torch.float16)[dtype]
    table, elements = L.table("mxq_decode_table", fmt, kind, L.DECODE_TABLE), torch.randn(1 << bits)
    row_bytes = {4: (columns + 1) // 2, 6: (columns + 3) // 4 * 3, 8: columns}[bits]
    packed, scale = random_bytes(rng, rows * row_bytes), random_bytes(rng, blocks_of(rows, columns, r, c))
    out = Output(rows * columns * (4 if dtype == 0 else 2))
    job = L.DequantJob(
        packed=packed.data_ptr(), scale=scale.data_ptr(), rows=rows, columns=columns, dtype=dtype, bits=bits,
        block_rows=r, block_columns=c, format=fmt, table=table.data_ptr(), elements=elements.data_ptr(),
        out=out.pointer, threads=rng.choice((1, 2)),
    )  # fmt: skip
    assert L.library().mxq_dequantize(ctypes.byref(job)) == L.OK
    out.assert_untouched_around()


def fuzz_linear(rng: random.Random) -> None:
    (n, k), (r, c), dtype = shape(rng), block(rng), rng.randrange(3)
    m, fmt = rng.choice((1, 2, 3, 4, 7, 8, 9, 16, 17, 30)), scale_format(rng)
    table = L.table("mxq_decode_table", fmt, torch.bfloat16, L.DECODE_TABLE)
    packed, scale = random_bytes(rng, n * ((k + 1) // 2)), random_bytes(rng, blocks_of(n, k, r, c))
    x, bias, divisor = weights(rng, dtype, m * k), random_bytes(rng, 4 * n), torch.tensor([3.7])
    y = Output(m * n * (4 if dtype == 0 else 2))
    weight = L.LinearWeight(
        packed=packed.data_ptr(), scale=scale.data_ptr(), table=table.data_ptr(), n=n, k=k,
        bias=rng.choice((None, bias.data_ptr())), bias_dtype=rng.randrange(3),
        global_scale=rng.choice((None, divisor.data_ptr())), block_rows=r, block_columns=c, format=fmt,
    )  # fmt: skip
    job = (ctypes.byref(weight), x.data_ptr(), y.pointer, m, dtype, rng.choice((1, 2)))
    assert L.library().mxq_linear(*job) == L.OK
    y.assert_untouched_around()


@pytest.mark.parametrize("fuzz", [fuzz_quantize, fuzz_dequantize, fuzz_linear])
def test_random_jobs_write_their_result_and_nothing_else(fuzz):
    end, seed = time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end or seed < 30:
            rng = random.Random(seed)
            L.set_level(rng.choice(LEVELS))
            fuzz(rng)
            seed += 1
    finally:
        L.set_level(L.best_level())


BAD = [-1, 0, 3, 7, 255, 1 << 30, -(1 << 31), (1 << 62), None]


@pytest.mark.parametrize("kind", ["quantize", "dequantize", "linear"])
def test_bad_arguments_give_an_error_code(kind):
    """Each field in turn gets values that cannot be; jobs whose sizes would be served are not run."""
    x = torch.zeros(4096, dtype=torch.uint8)
    fmt = L.ScaleFormat(3, 15, 254, 0.0)
    good = {
        "quantize": L.QuantJob(
            x=x.data_ptr(), rows=2, columns=16, stride=16, dtype=1, block_rows=1, block_columns=16, rule=0, format=fmt,
            tables=L.table("mxq_quant_tables", fmt, torch.bfloat16, L.QUANT_TABLES).data_ptr(),
            packed=x.data_ptr(), scale=x.data_ptr() + 2048,
        ),
        "dequantize": L.DequantJob(
            packed=x.data_ptr(), scale=x.data_ptr(), rows=2, columns=16, dtype=1, bits=8, block_rows=1,
            block_columns=16, format=fmt, elements=torch.zeros(256).data_ptr(), out=x.data_ptr() + 2048,
        ),
        "linear": L.LinearWeight(
            packed=x.data_ptr(), scale=x.data_ptr(), n=2, k=16, block_rows=1, block_columns=16, format=fmt,
            table=L.table("mxq_decode_table", fmt, torch.bfloat16, L.DECODE_TABLE).data_ptr(),
        ),
    }[kind]  # fmt: skip
    call = getattr(L.library(), f"mxq_{kind}")
    if kind == "linear":
        linear = L.library().mxq_linear
        call = lambda weight: linear(weight, x.data_ptr(), x.data_ptr() + 2048, 1, 1, 1)  # noqa: E731
    pointers = {"x", "y", "packed", "scale", "tables", "out"}
    for name in ("x", "packed", "scale", "rows", "columns", "m", "n", "k", "dtype", "block_rows", "block_columns", "bits", "rule", "out", "y", "tables", "first_row", "carry"):  # fmt: skip  # noqa: E501
        if not hasattr(good, name):
            continue
        for value in (None,) if name in pointers else BAD[:-1]:
            job = type(good).from_buffer_copy(good)
            valid = {"block_rows": range(1, 4097), "dtype": range(3), "rule": range(5), "carry": range(1 << 23)}
            if value is not None and (value in valid.get(name, ()) or (name not in valid and 0 < value <= 1 << 40)):
                continue
            if name == "first_row" and value == 0:
                continue
            try:
                setattr(job, name, value)
            except (OverflowError, TypeError):
                continue
            if name not in pointers and getattr(job, name) != value:
                continue  # did not fit the field
            assert call(ctypes.byref(job)) == L.BAD_ARGUMENT, (name, value)
    assert call(None) == L.BAD_ARGUMENT
    assert L.library().mxq_set_level(17) == L.NO_SUCH_LEVEL


def test_bad_activations_give_an_error_code():
    memory, fmt = torch.zeros(4096, dtype=torch.uint8), L.ScaleFormat(3, 15, 254, 0.0)
    table = L.table("mxq_decode_table", fmt, torch.bfloat16, L.DECODE_TABLE)
    x, y = memory.data_ptr(), memory.data_ptr() + 2048
    weight = L.LinearWeight(
        packed=x, scale=x, table=table.data_ptr(), n=2, k=16, block_rows=1, block_columns=16, format=fmt
    )
    w, linear = ctypes.addressof(weight), L.library().mxq_linear
    assert linear(w, x, y, 1, 1, 1) == L.OK
    assert linear(w, x, y, 1, 1, -5) == L.OK
    for bad in ((w, None, y, 1, 1, 1), (w, x, None, 1, 1, 1), (w, x, y, 0, 1, 1), (w, x, y, -1, 1, 1)):
        assert linear(*bad) == L.BAD_ARGUMENT, bad
    for dtype in (-1, 3, 1 << 30):
        assert linear(w, x, y, 1, dtype, 1) == L.BAD_ARGUMENT
