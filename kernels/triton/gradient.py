"""``dX = dY W``: the gradient of a linear layer's input, from the same packed bytes as the forward pass.

The weight is the right operand here and the sum runs over its rows, so a tile of it is decoded along K
as it lies in memory and goes through shared memory to the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.triton.configs import Config
from mxquant.kernels.triton.decode import EXPONENTS, INTERPRETED, LAYOUTS, rounded
from mxquant.kernels.triton.launch import Launch
from mxquant.kernels.triton.linear import terms
from mxquant.kernels.triton.matmul import finish, leading_bf16
from mxquant.kernels.triton.tiles import block_codes, swizzled, weight_tile
from mxquant.schemes.formats import QuantScheme


@triton.jit
def gradient_kernel(
    grad_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    out_ptr,
    M,
    N,
    K,
    grad_stride,
    row_bytes,
    scale_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPONENT: tl.constexpr,
    TERMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile ``[TILE_M, TILE_K]`` of dX. grad: ``[M, N]``, rows ``grad_stride`` apart; out: ``[M, K]``."""
    tile_m, tile_k = swizzled(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(K, TILE_K), GROUP)
    m = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k0 = tile_k * TILE_K
    FP16: tl.constexpr = TERMS == 1 and grad_ptr.dtype.element_ty == tl.float16
    grad_row = grad_ptr + tl.minimum(m, M - 1) * grad_stride
    acc = tl.zeros((TILE_M, TILE_K), tl.float32)
    for n0 in range(0, N, TILE_N):
        n = n0 + tl.arange(0, TILE_N)
        row = tl.minimum(n, N - 1).to(tl.int64)
        packed_row = packed_ptr + row * row_bytes
        scale_row = scale_ptr + (row // BLOCK_ROWS) * scale_columns
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
            FP16,
            TILE_N,
            TILE_K,
            EVEN_K,
        )
        weight = tl.join(low, high).reshape(TILE_N, TILE_K)
        grad = tl.load(grad_row[:, None] + n[None, :], mask=(n < N)[None, :], other=0.0)
        acc = _dot_exact(grad, weight, acc, TERMS)
    k = k0 + tl.arange(0, TILE_K)
    out = rounded(finish(acc, global_ptr, EXPONENT), out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * K + k[None, :], out, mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def _dot_exact(x, weight, acc, TERMS: tl.constexpr):
    """``matmul.dot_exact`` with the weight on the right."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
    if TERMS == 1:
        return tl.dot(x, weight.to(x.dtype), acc)
    weight = weight.to(tl.bfloat16)
    lead, rest = leading_bf16(x.to(tl.float32))
    acc = tl.dot(lead.to(tl.bfloat16), weight, acc)
    if TERMS == 3:
        lead, rest = leading_bf16(rest)
        acc = tl.dot(lead.to(tl.bfloat16), weight, acc)
    return tl.dot(rest.to(tl.bfloat16), weight, acc)


def config(m: int, parts: int) -> Config:
    """The tile for ``m`` rows of gradient; ``n`` is the step along the sum, ``k`` the width of the tile."""
    if m <= 16:
        return Config(16, 64, 64, 128, 3)
    return Config(64, 32, 128, 128, 3) if parts > 1 else Config(128, 64, 128, 256, 3)


def plan(
    grad: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Launch:
    """The launch that fills ``out`` ``[M, K]``. ``grad``: ``[M, N]`` with contiguous rows."""
    (m, n), k = grad.shape, out.shape[1]
    layout, parts = LAYOUTS[scheme.scale], terms(grad.dtype, scheme)
    tile = config(m, parts)
    return Launch(
        gradient_kernel,
        (triton.cdiv(m, tile.m) * triton.cdiv(k, tile.k),),
        {
            "grad_ptr": grad,
            "packed_ptr": packed,
            "scale_ptr": scale.view(torch.uint8),
            "global_ptr": global_scale,
            "out_ptr": out,
            "M": m,
            "N": n,
            "K": k,
            "grad_stride": grad.stride(0),
            "row_bytes": packed.shape[1],
            "scale_columns": scale.shape[1],
        },
        {
            "BLOCK_ROWS": scheme.block_shape[0],
            "BLOCK_COLUMNS": scheme.block_shape[1],
            "LAYOUT": layout,
            "EXPONENT": EXPONENTS[layout, parts == 1 and grad.dtype == torch.float16],
            "TERMS": parts,
            "EVEN_K": k % tile.k == 0,
            "TILE_M": tile.m,
            "TILE_N": tile.n,
            "TILE_K": tile.k,
            "GROUP": tile.group,
        },
        tile.threads,
        {"num_stages": tile.stages},
    )
