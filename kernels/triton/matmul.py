"""``Y = X W^T + bias`` for several rows of X: a tensor-core product with the weight decoded in registers.

The product is computed as ``Y^T = W X^T``: the weight is the left operand, which Hopper's tensor cores
take from registers, where it was just decoded, and few rows of X pad to 16 rather than 64. Packed
bytes are read once for each tile of X. Weights are exact in bf16 (two significant bits times at most
four), so all rounding is that of fp32 accumulation. The global scale divides the sums.

Activations: bf16 as they are. fp16 with fp16 weights, where the scale format fits into fp16; else, and
for fp32, they are split into two or three bf16 terms whose sum they are exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.triton.decode import INTERPRETED, power_of_two, rounded
from mxquant.kernels.triton.tiles import block_codes, swizzled, weight_tile


@triton.jit
def leading_bf16(x):
    """fp32 -> its leading 8 significant bits, and what is left (0 where nothing can be)."""
    lead = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return lead, tl.where(tl.abs(lead) < float("inf"), x - lead, 0.0)


@triton.jit
def dot_exact(weight, x, acc, TERMS: tl.constexpr):
    """``acc + weight @ x`` in fp32; weight fp32 holding bf16 numbers (fp16 with TERMS 1 and fp16 x).

    ``TERMS``: how many bf16 numbers each x is the sum of; 1 if it is bf16, or fp16 with fp16 weights.
    """
    if INTERPRETED:
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    if TERMS == 1:
        return tl.dot(weight.to(x.dtype), x, acc)
    weight = weight.to(tl.bfloat16)
    lead, rest = leading_bf16(x.to(tl.float32))
    acc = tl.dot(weight, lead.to(tl.bfloat16), acc)
    if TERMS == 3:
        lead, rest = leading_bf16(rest)
        acc = tl.dot(weight, lead.to(tl.bfloat16), acc)
    return tl.dot(weight, rest.to(tl.bfloat16), acc)


@triton.jit
def finish(acc, global_ptr, EXPONENT: tl.constexpr):
    """Sums of ``weight * 2^-EXPONENT`` -> sums of weights: the factor back, the global scale out."""
    if EXPONENT != 0:
        acc = acc * power_of_two(EXPONENT)
    if global_ptr is not None:
        acc = acc / tl.load(global_ptr)
    return acc


@triton.jit
def matmul_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    row_bytes,
    scale_columns,
    steps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPONENT: tl.constexpr,
    TERMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile ``[TILE_M, TILE_N]`` of Y over ``steps`` steps of TILE_K.

    x: ``[M, K]``, rows ``x_stride`` apart. out: ``[M, N]`` in x's dtype or, if SPLIT, fp32
    ``[splits, M, N]``: program axis 1 is the part of K, and :func:`reduce_kernel` adds the parts up.
    """
    tile_m, tile_n = swizzled(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    n = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    m = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    part = tl.program_id(1)
    FP16: tl.constexpr = TERMS == 1 and x_ptr.dtype.element_ty == tl.float16

    row = tl.minimum(n, N - 1)  # rows past the last one repeat it; nobody reads their results
    packed_row = packed_ptr + row * row_bytes
    scale_row = scale_ptr + (row // BLOCK_ROWS) * scale_columns
    x_row = x_ptr + tl.minimum(m, M - 1) * x_stride
    acc = tl.zeros((TILE_N, TILE_M), tl.float32)
    code = block_codes(scale_row, part * steps * TILE_K, scale_columns, BLOCK_COLUMNS, TILE_K, True)
    for step in range(part * steps, (part + 1) * steps):
        k0 = step * TILE_K
        following = block_codes(scale_row, k0 + TILE_K, scale_columns, BLOCK_COLUMNS, TILE_K, True)
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
        code = following

    inside = (m < M)[:, None] & (n < N)[None, :]
    out = out_ptr + m[:, None] * N + n[None, :]
    if SPLIT:
        tl.store(out + part.to(tl.int64) * M * N, acc.trans(), mask=inside)
    else:
        acc = finish(acc, global_ptr, EXPONENT)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + tl.minimum(n, N - 1)).to(tl.float32)[:, None]
        tl.store(out, rounded(acc.trans(), out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def reduce_kernel(
    parts_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    size,
    N,
    splits,
    EXPONENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sum of fp32 ``[splits, size]`` in one fixed order, then the epilogue; out: ``[size]``."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    acc = tl.zeros((TILE,), tl.float32)
    for _ in range(splits):
        acc += tl.load(parts_ptr + at, mask=inside, other=0.0)
        parts_ptr += size
    acc = finish(acc, global_ptr, EXPONENT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, rounded(acc, out_ptr.dtype.element_ty), mask=inside)
