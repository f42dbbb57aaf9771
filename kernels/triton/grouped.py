"""``Y = X W_e^T + b_e``, the rows of X sorted by expert: one launch for all experts of a mixture.

The product within a tile is that of :mod:`mxquant.kernels.triton.matmul`. How many rows an expert gets
is known on the device only, so that nothing waits for it: the grid has room for every expert's last,
partly filled tile, each program looks up which expert it works for, and those left over return.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.triton.configs import Config
from mxquant.kernels.triton.decode import EXPONENTS, LAYOUTS, rounded
from mxquant.kernels.triton.launch import Launch
from mxquant.kernels.triton.linear import terms
from mxquant.kernels.triton.matmul import dot_exact, finish
from mxquant.kernels.triton.tiles import block_codes, weight_tile
from mxquant.schemes.formats import QuantScheme


@triton.jit
def grouped_kernel(
    x_ptr,
    ends_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    row_bytes,
    scale_rows,
    scale_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPONENT: tl.constexpr,
    TERMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One tile ``[TILE_M, TILE_N]`` of Y for one expert; program axes are row tiles and column tiles.

    ends: int32 ``[EXPERTS]``, the row after each expert's last; EXPERTS_2: the next power of two.
    """
    expert, first, end = _work(ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_2, TILE_M)
    expert = expert.to(tl.int64)
    if first < end:
        FP16: tl.constexpr = TERMS == 1 and x_ptr.dtype.element_ty == tl.float16
        n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        m = first.to(tl.int64) + tl.arange(0, TILE_M)
        row = tl.minimum(n, N - 1)  # rows past the last one repeat it; nobody reads their results
        packed_row = packed_ptr + (expert * N + row) * row_bytes
        scale_row = scale_ptr + (expert * scale_rows + row // BLOCK_ROWS) * scale_columns
        x_row = x_ptr + tl.minimum(m, end - 1) * x_stride
        acc = tl.zeros((TILE_N, TILE_M), tl.float32)
        for k0 in range(0, K, TILE_K):
            code = block_codes(scale_row, k0, scale_columns, BLOCK_COLUMNS, TILE_K, True)
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
                FP16,
                TILE_N,
                TILE_K,
                EVEN_K,
            )
            weight = tl.join(low, high).reshape(TILE_N, TILE_K)
            k = k0 + tl.arange(0, TILE_K)
            if EVEN_K:
                x = tl.load(x_row[:, None] + k[None, :])
            else:
                x = tl.load(x_row[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
            acc = dot_exact(weight, x.trans(), acc, TERMS)
        if global_ptr is None:  # noqa: SIM108  (compiled, only one of them exists)
            acc = finish(acc, None, EXPONENT)
        else:
            acc = finish(acc, global_ptr + expert, EXPONENT)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * N + row).to(tl.float32)[:, None]
        out = out_ptr + m[:, None] * N + n[None, :]
        inside = (m < end)[:, None] & (n < N)[None, :]
        tl.store(out, rounded(acc.trans(), out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _work(ends_ptr, slot, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr, TILE_M: tl.constexpr):
    """The expert of a row tile, the tile's first row and the row after the expert's last; no rows if none."""
    at = tl.arange(0, EXPERTS_2)
    known = at < EXPERTS
    end = tl.load(ends_ptr + at, mask=known, other=0)
    start = tl.load(ends_ptr + at - 1, mask=known & (at > 0), other=0)
    tiles = tl.where(known, (end - start + TILE_M - 1) // TILE_M, 0)
    after = tl.cumsum(tiles, 0)
    mine = (after - tiles <= slot) & (slot < after)
    expert = tl.sum(tl.where(mine, at, 0), 0)
    first = tl.sum(tl.where(mine, start + (slot - after + tiles) * TILE_M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


def choose(rows: int, experts: int, parts: int) -> Config:
    """Tiles as deep as an expert's usual number of rows asks for."""
    if parts > 1:
        return Config(32 if rows > 16 * experts else 16, 64, 64, 128, 3)
    if rows <= 16 * experts:
        return Config(16, 64, 128, 128, 4)
    return Config(64, 128, 64, 256, 3) if rows <= 64 * experts else Config(128, 128, 64, 256, 3)


def plan(
    x: torch.Tensor,
    ends: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Launch:
    """The launch that fills ``out`` ``[M, N]`` from ``x`` ``[M, K]`` with contiguous rows.

    ``ends``: int32 ``[E]``; ``packed`` ``[E, N, row bytes]``, ``scale`` ``[E, ...]``, ``global_scale`` fp32
    ``[E]``, ``bias`` ``[E, N]``, all contiguous.
    """
    (m, k), (experts, n, row_bytes) = x.shape, packed.shape
    layout, parts = LAYOUTS[scheme.scale], terms(x.dtype, scheme)
    config = choose(m, experts, parts)
    return Launch(
        grouped_kernel,
        (triton.cdiv(m, config.m) + experts, triton.cdiv(n, config.n)),
        {
            "x_ptr": x,
            "ends_ptr": ends,
            "packed_ptr": packed,
            "scale_ptr": scale.view(torch.uint8),
            "global_ptr": global_scale,
            "bias_ptr": bias,
            "out_ptr": out,
            "N": n,
            "K": k,
            "x_stride": x.stride(0),
            "row_bytes": row_bytes,
            "scale_rows": scale.shape[1],
            "scale_columns": scale.shape[2],
        },
        {
            "BLOCK_ROWS": scheme.block_shape[0],
            "BLOCK_COLUMNS": scheme.block_shape[1],
            "LAYOUT": layout,
            "EXPONENT": EXPONENTS[layout, parts == 1 and x.dtype == torch.float16],
            "TERMS": parts,
            "EVEN_K": k % config.k == 0,
            "EXPERTS": experts,
            "EXPERTS_2": triton.next_power_of_2(experts),
            "TILE_M": config.m,
            "TILE_N": config.n,
            "TILE_K": config.k,
        },
        config.threads,
        {"num_stages": config.stages},
    )
