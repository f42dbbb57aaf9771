"""Dense weight -> packed elements and block scales, in one pass: the bytes of the reference.

A program holds whole blocks in registers as ``[BLOCKS, ELEMENTS]`` (a tile's elements row by row), finds
their maxima and scales, divides, rounds and packs. It is compiled without fused multiply-add and divides
by ``div_rn``, so that no result differs from the reference in its last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.triton.decode import LAYOUTS
from mxquant.kernels.triton.launch import Launch
from mxquant.kernels.triton.random import random_bits24
from mxquant.kernels.triton.rules import RULES, block_codes, divided, nearest_magnitude
from mxquant.schemes.formats import QuantScheme


@triton.jit(do_not_specialize=["key_low", "key_high"])
def quantize_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bad_ptr,
    N,
    K,
    row_bytes,
    scale_rows,
    scale_columns,
    key_low,
    key_high,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    RULE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """``[TILE_N, TILE_K]`` weights, a whole number of blocks each way.

    ``bad``: int32 ``[1]``, set to 1 if a weight is not finite; the rest of the results means nothing then."""
    UP: tl.constexpr = TILE_N // BLOCK_ROWS
    ACROSS: tl.constexpr = TILE_K // BLOCK_COLUMNS
    row = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    column = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    index = row[:, None] * K + column[None, :]
    inside = (row < N)[:, None] & (column < K)[None, :]
    x = tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32)

    bad = tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)
    tl.store(bad_ptr, 1, mask=bad > 0)
    magnitude = _by_block(tl.abs(x), UP, BLOCK_ROWS, ACROSS, BLOCK_COLUMNS)
    amax = tl.max(magnitude, 1)
    code = block_codes(magnitude, amax, global_ptr, LAYOUT, RULE, MAX_CODE)
    magnitude = divided(magnitude, code, global_ptr, LAYOUT)
    if STOCHASTIC:
        bits = _by_block(random_bits24(key_low, key_high, index), UP, BLOCK_ROWS, ACROSS, BLOCK_COLUMNS)
        element = _stochastic_code(magnitude, bits)
    else:
        element = _nearest_code(magnitude)

    element = element.reshape(UP, ACROSS, BLOCK_ROWS, BLOCK_COLUMNS).permute(0, 2, 1, 3).reshape(TILE_N, TILE_K)
    element |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = element.reshape(TILE_N, TILE_K // 2, 2).split()
    byte = tl.program_id(1) * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
    tl.store(
        packed_ptr + row[:, None] * row_bytes + byte[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=(row < N)[:, None] & (byte < row_bytes)[None, :],
    )
    block_row = tl.program_id(0).to(tl.int64) * UP + tl.arange(0, UP)
    block_column = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    tl.store(
        scale_ptr + block_row[:, None] * scale_columns + block_column[None, :],
        code.reshape(UP, ACROSS).to(tl.uint8),
        mask=(block_row < scale_rows)[:, None] & (block_column < scale_columns)[None, :],
    )


@triton.jit
def _by_block(x, UP: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[UP * ROWS, ACROSS * COLUMNS]`` -> ``[UP * ACROSS, ROWS * COLUMNS]``: one block a row."""
    if ROWS == 1:
        return x.reshape(UP * ACROSS, COLUMNS)
    return x.reshape(UP, ROWS, ACROSS, COLUMNS).permute(0, 2, 1, 3).reshape(UP * ACROSS, ROWS * COLUMNS)


@triton.jit
def _nearest_code(x):
    """E2M1 magnitude codes (int32) of fp32 ``x >= 0``: 0 .5 1 1.5 2 3 4 6 lie on three straight lines,
    of which the lowest is the code."""
    value = nearest_magnitude(x)
    return tl.minimum(tl.minimum(value * 2.0, value + 2.0), value * 0.5 + 4.0).to(tl.int32)


@triton.jit
def _stochastic_code(x, bits24):
    """E2M1 magnitude codes (int32): the upper neighbour with the probability of the distance to the lower."""
    x = tl.minimum(x, 6.0)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    steps = x * ((128 - exponent) << 23).to(tl.float32, bitcast=True)
    floor = tl.floor(steps)
    up = bits24.to(tl.float32) < (steps - floor) * 16777216.0
    return (exponent << 1) + floor.to(tl.int32) + up.to(tl.int32)


def plan(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bad: torch.Tensor,
    scheme: QuantScheme,
    key: int,
) -> Launch:
    """The launch that fills ``packed`` and ``scale`` (uint8 codes) from a weight ``[N, K]``.

    ``bad``: int32 ``[1]``, zero; becomes 1 if a weight is not finite.

    ``key``: the 64-bit key of :func:`mxquant.codec.rng.derive_key`.
    """
    rows, columns = weight.shape
    r, c = scheme.block_shape
    tile_k = max(c, min(256, 4096 // r))
    tile_n = max(r, 2048 // tile_k)
    return Launch(
        quantize_kernel,
        (triton.cdiv(rows, tile_n), triton.cdiv(columns, tile_k)),
        {
            "weight_ptr": weight,
            "packed_ptr": packed,
            "scale_ptr": scale,
            "global_ptr": global_scale,
            "bad_ptr": bad,
            "N": rows,
            "K": columns,
            "row_bytes": packed.shape[1],
            "scale_rows": scale.shape[0],
            "scale_columns": scale.shape[1],
            "key_low": _signed(key & 0xFFFFFFFF),
            "key_high": _signed(key >> 32),
        },
        {
            "BLOCK_ROWS": r,
            "BLOCK_COLUMNS": c,
            "LAYOUT": LAYOUTS[scheme.scale],
            "RULE": RULES[str(scheme.scale_rule)],
            "MAX_CODE": scheme.scale_format.max_code,
            "STOCHASTIC": scheme.rounding == "stochastic",
            "TILE_N": tile_n,
            "TILE_K": tile_k,
        },
        128,
        {"enable_fp_fusion": False},
    )


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
