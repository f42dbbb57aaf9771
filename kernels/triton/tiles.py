"""Loading one tile of a packed weight and making numbers of it; shared by all products."""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.triton.decode import scaled_pair


@triton.jit
def block_codes(
    scale_row,
    k0,
    scale_columns,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,
):
    """int32 scale codes of the blocks in columns ``k0 : k0 + TILE_K``: ``[TILE_N, TILE_K / BLOCK_COLUMNS]``.

    ``scale_row``: pointers ``[TILE_N]`` to the rows' scales. One load a block, where blocks are a power
    of two long; for other lengths ``weight_tile`` reads the codes itself, and this answers a stub. Kept
    apart from ``weight_tile`` so that a loop can load the next step's codes before it needs them: they are
    too few bytes for the compiler's asynchronous copies.
    """
    if BLOCK_COLUMNS > 1 and BLOCK_COLUMNS & (BLOCK_COLUMNS - 1) == 0:
        SPAN: tl.constexpr = BLOCK_COLUMNS if BLOCK_COLUMNS < TILE_K else TILE_K
        block = k0 // BLOCK_COLUMNS + tl.arange(0, TILE_K // SPAN)
        at = scale_row[:, None] + block[None, :]
        if MASK:
            code = tl.load(at, mask=(block < scale_columns)[None, :], other=0).to(tl.int32)
        else:
            code = tl.load(at).to(tl.int32)
    else:
        code = tl.zeros((1, 1), tl.int32)
    return code


@triton.jit
def weight_tile(
    packed_row,
    scale_row,
    code,
    k0,
    K,
    row_bytes,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPONENT: tl.constexpr,
    FP16: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Weights in columns ``k0 : k0 + TILE_K`` as their low and high nibbles, each ``[TILE_N, TILE_K / 2]``.

    ``packed_row``, ``scale_row``: pointers ``[TILE_N]`` to the rows; ``code``: what ``block_codes`` gave.
    ``k0`` is a multiple of TILE_K; columns past K are zero. Values are fp32
    ``value * 2^-EXPONENT``, numbers of fp16 where FP16, else of bf16.
    """
    HALF: tl.constexpr = TILE_K // 2
    column = k0 // 2 + tl.arange(0, HALF)
    at = packed_row[:, None] + column[None, :]
    byte = tl.load(at).to(tl.int32) if EVEN_K else tl.load(at, mask=(column < row_bytes)[None, :], other=0).to(tl.int32)
    if BLOCK_COLUMNS > 1 and BLOCK_COLUMNS & (BLOCK_COLUMNS - 1) == 0:
        SPAN: tl.constexpr = BLOCK_COLUMNS if BLOCK_COLUMNS < TILE_K else TILE_K
        byte = byte.reshape(TILE_N, TILE_K // SPAN, SPAN // 2)
        low, high = scaled_pair(byte, code[:, :, None], LAYOUT, EXPONENT, FP16)
        low = low.reshape(TILE_N, HALF)
        high = high.reshape(TILE_N, HALF)
    else:
        inside = (column < row_bytes)[None, :]
        code = tl.load(scale_row[:, None] + (2 * column // BLOCK_COLUMNS)[None, :], mask=inside, other=0)
        low, high = scaled_pair(byte, code.to(tl.int32), LAYOUT, EXPONENT, FP16)
        if BLOCK_COLUMNS % 2 == 1:  # the two weights of a byte may belong to two blocks
            inside = (2 * column + 1 < K)[None, :]
            code = tl.load(scale_row[:, None] + ((2 * column + 1) // BLOCK_COLUMNS)[None, :], mask=inside, other=0)
            _, high = scaled_pair(byte, code.to(tl.int32), LAYOUT, EXPONENT, FP16)
    return low, high


@triton.jit
def swizzled(program, rows, columns, GROUP: tl.constexpr):
    """Program number -> tile (row, column), GROUP rows at a time, so that neighbours in time share
    tiles in the L2 cache."""
    per_group = GROUP * columns
    first = program // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = program % per_group
    return first + inside % height, inside // height
