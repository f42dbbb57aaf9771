"""``y = x W^T`` for one row of x: each weight meets one activation, so ordinary fp32 arithmetic does it.

The tensor core would do sixteen times the work for the same bytes; here a thread holds 16 bytes (32
weights) of a row at a time, decodes them and multiplies them with activations that all rows of its
tile share. Sums stay apart in registers until the end, where one reduction adds them up.

Two kernels: one reads 32-bit words of eight weights, of one block each, and multiplies by the scale once
a word; the other reads bytes and serves what does not come in such words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.triton.decode import decode_scale, element_at, rounded
from mxquant.kernels.triton.matmul import finish
from mxquant.kernels.triton.tiles import block_codes, weight_tile


@triton.jit
def gemv_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    row_bytes,
    scale_columns,
    steps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPONENT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """TILE_N outputs over ``steps`` steps of TILE_K.

    x: ``[K]``. out: ``[N]`` in x's dtype or, if SPLIT, fp32 ``[splits, N]`` (program axis 1 is the part
    of K), to be added up by ``reduce_kernel``.
    """
    HALF: tl.constexpr = TILE_K // 2
    n = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(1)
    row = tl.minimum(n, N - 1)  # rows past the last one repeat it; nobody reads their results
    packed_row = packed_ptr + row * row_bytes
    scale_row = scale_ptr + (row // BLOCK_ROWS) * scale_columns
    acc = tl.zeros((TILE_N, HALF), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        k0 = step * TILE_K
        code = block_codes(scale_row, k0, scale_columns, BLOCK_COLUMNS, TILE_K, not EVEN_K)
        low, high = weight_tile(
            packed_row,
            scale_row,
            code,
            k0,
            K,
            row_bytes,
            BLOCK_COLUMNS,
            LAYOUT,
            EXPONENT,
            False,
            TILE_N,
            TILE_K,
            EVEN_K,
        )
        k = k0 + tl.arange(0, TILE_K)
        x = tl.load(x_ptr + k) if EVEN_K else tl.load(x_ptr + k, mask=k < K, other=0.0)
        even, odd = x.to(tl.float32).reshape(HALF, 2).split()
        acc += low * even[None, :]
        acc += high * odd[None, :]

    y = tl.sum(acc, 1)
    if SPLIT:
        tl.store(out_ptr + part.to(tl.int64) * N + n, y, mask=n < N)
    else:
        y = finish(y, global_ptr, EXPONENT)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + n, rounded(y, out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def gemv_words_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    row_bytes,
    scale_columns,
    steps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """As ``gemv_kernel`` where K and BLOCK_COLUMNS are multiples of 8, the latter a power of two.

    packed: int32 ``[N, row_bytes / 4]``; nibble ``i`` of word ``j`` is the weight in column ``8 j + i``.
    """
    WORDS: tl.constexpr = TILE_K // 8
    SPAN: tl.constexpr = BLOCK_COLUMNS if BLOCK_COLUMNS < TILE_K else TILE_K
    n = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(1)
    row = tl.minimum(n, N - 1)  # rows past the last one repeat it; nobody reads their results
    row_words = row_bytes // 4
    packed_row = packed_ptr + row * row_words
    scale_row = scale_ptr + (row // BLOCK_ROWS) * scale_columns
    acc = tl.zeros((TILE_N, WORDS), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        k0 = step * TILE_K
        column = k0 // 8 + tl.arange(0, WORDS)
        k = k0 + tl.arange(0, TILE_K)
        if EVEN_K:
            word = tl.load(packed_row[:, None] + column[None, :])
            x = tl.load(x_ptr + k)
        else:
            word = tl.load(packed_row[:, None] + column[None, :], mask=(column < row_words)[None, :], other=0)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        scale = decode_scale(block_codes(scale_row, k0, scale_columns, BLOCK_COLUMNS, TILE_K, not EVEN_K), LAYOUT)
        # Columns 8 j + i as eight vectors over j: split takes the lowest bit of i first.
        even, odd = x.to(tl.float32).reshape(WORDS, 2, 2, 2).split()
        x02, x13 = even.split(), odd.split()
        x0, x4 = x02[0].split()
        x2, x6 = x02[1].split()
        x1, x5 = x13[0].split()
        x3, x7 = x13[1].split()
        dot = element_at(word, 0) * x0[None, :]
        dot += element_at(word, 1) * x1[None, :]
        dot += element_at(word, 2) * x2[None, :]
        dot += element_at(word, 3) * x3[None, :]
        dot += element_at(word, 4) * x4[None, :]
        dot += element_at(word, 5) * x5[None, :]
        dot += element_at(word, 6) * x6[None, :]
        dot += element_at(word, 7) * x7[None, :]
        scaled = dot.reshape(TILE_N, TILE_K // SPAN, SPAN // 8) * scale[:, :, None]
        acc += scaled.reshape(TILE_N, WORDS)

    y = tl.sum(acc, 1)
    if SPLIT:
        tl.store(out_ptr + part.to(tl.int64) * N + n, y, mask=n < N)
    else:
        y = finish(y, global_ptr, 0)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + n, rounded(y, out_ptr.dtype.element_ty), mask=n < N)
