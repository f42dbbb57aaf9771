"""Packed weight -> dense weight: one fp32 product a weight, then one rounding to the output's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.triton.decode import LAYOUTS, decode_scale, rounded, tiny_high, tiny_low
from mxquant.kernels.triton.launch import Launch
from mxquant.schemes.formats import QuantScheme

_TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def dequantize_kernel(
    packed_ptr,
    scale_ptr,
    global_ptr,
    out_ptr,
    N,
    K,
    row_bytes,
    scale_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One ``[TILE_N, TILE_K]`` tile: ``out = element * fl32(scale / global)``."""
    HALF: tl.constexpr = TILE_K // 2
    row = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    k0 = tl.program_id(1) * TILE_K
    column = k0 // 2 + tl.arange(0, HALF)
    inside = (row < N)[:, None] & (column < row_bytes)[None, :]
    byte = tl.load(packed_ptr + row[:, None] * row_bytes + column[None, :], mask=inside, other=0).to(tl.int32)

    scale_row = scale_ptr + (row // BLOCK_ROWS) * scale_columns
    low_scale = _scales(scale_row, k0, 0, row, N, K, global_ptr, BLOCK_COLUMNS, LAYOUT, TILE_N, HALF)
    if BLOCK_COLUMNS % 2 == 0:
        high_scale = low_scale
    else:  # the two weights of a byte may belong to two blocks
        high_scale = _scales(scale_row, k0, 1, row, N, K, global_ptr, BLOCK_COLUMNS, LAYOUT, TILE_N, HALF)
    low = tiny_low(byte) * _TWO_126 * low_scale
    high = tiny_high(byte) * _TWO_126 * high_scale

    k = k0 + tl.arange(0, TILE_K)
    value = rounded(tl.join(low, high).reshape(TILE_N, TILE_K), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + k[None, :], value, mask=(row < N)[:, None] & (k < K)[None, :])


@triton.jit
def _scales(
    scale_row,
    k0,
    ODD: tl.constexpr,
    row,
    N,
    K,
    global_ptr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_N: tl.constexpr,
    HALF: tl.constexpr,
):
    """``fl32(scale / global)`` of the weights in columns ``k0 + ODD + 2 * arange(HALF)``: ``[TILE_N, HALF]``.

    Where a tile holds whole blocks, each scale is read and divided once.
    """
    WHOLE: tl.constexpr = BLOCK_COLUMNS % 2 == 0 and 2 * HALF % BLOCK_COLUMNS == 0
    if WHOLE:
        block = k0 // BLOCK_COLUMNS + tl.arange(0, 2 * HALF // BLOCK_COLUMNS)
        inside = block * BLOCK_COLUMNS < K
    else:
        k = k0 + ODD + 2 * tl.arange(0, HALF)
        block = k // BLOCK_COLUMNS
        inside = k < K
    code = tl.load(scale_row[:, None] + block[None, :], mask=(row < N)[:, None] & inside[None, :], other=0)
    scale = decode_scale(code.to(tl.int32), LAYOUT)
    if global_ptr is not None:
        scale = tl.div_rn(scale, tl.load(global_ptr))
    if WHOLE:
        scale = tl.broadcast_to(scale[:, :, None], TILE_N, 2 * HALF // BLOCK_COLUMNS, BLOCK_COLUMNS // 2)
        scale = scale.reshape(TILE_N, HALF)
    return scale


def plan(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Launch:
    """The launch that fills ``out`` ``[N, K]`` (fp32, bf16 or fp16)."""
    rows, columns = out.shape
    tile_n, tile_k = 16, 256
    return Launch(
        dequantize_kernel,
        (triton.cdiv(rows, tile_n), triton.cdiv(columns, tile_k)),
        {
            "packed_ptr": packed,
            "scale_ptr": scale.view(torch.uint8),
            "global_ptr": global_scale,
            "out_ptr": out,
            "N": rows,
            "K": columns,
            "row_bytes": packed.shape[1],
            "scale_columns": scale.shape[1],
        },
        {
            "BLOCK_ROWS": scheme.block_shape[0],
            "BLOCK_COLUMNS": scheme.block_shape[1],
            "LAYOUT": LAYOUTS[scheme.scale],
            "TILE_N": tile_n,
            "TILE_K": tile_k,
        },
        128,
    )
