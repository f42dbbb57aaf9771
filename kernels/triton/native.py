"""``Y = X W^T`` with both in FP4 (W4A4), on chips whose tensor cores multiply block-scaled FP4.

Blackwell (sm_100, sm_120) and CDNA 4 take MXFP4 (e8m0 scales, blocks of 32), Blackwell also NVFP4
(e4m3, 16). Activations are quantized by one pass of the quantize kernel before; there is no such
instruction for ue5m3 scales, so those are decoded in software. Block scales are applied by the tensor
core in its own arithmetic; global scales divide the sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.triton.decode import E4M3, E8M0, INTERPRETED, power_of_two, rounded, scaled_pair
from mxquant.kernels.triton.launch import Launch
from mxquant.kernels.triton.matmul import finish
from mxquant.kernels.triton.tiles import swizzled
from mxquant.schemes.formats import QuantScheme

# Scheme -> the dtype in which tensor cores read its scales.
SCALES = {("e8m0", (1, 32)): torch.uint8, ("e4m3", (1, 16)): torch.float8_e4m3fn}
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def native_kernel(
    x_ptr,
    x_scale_ptr,
    x_global_ptr,
    packed_ptr,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    row_bytes,
    scale_columns,
    BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile ``[TILE_M, TILE_N]`` of Y. x: ``[M, row_bytes]`` packed, its scales ``[M, scale_columns]``."""
    HALF: tl.constexpr = TILE_K // 2
    COUNT: tl.constexpr = TILE_K // BLOCK
    tile_m, tile_n = swizzled(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    m = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    row_m, row_n = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    byte, block = tl.arange(0, HALF), tl.arange(0, COUNT)
    x_at = x_ptr + row_m[:, None] * row_bytes + byte[None, :]
    w_at = packed_ptr + row_n[:, None] * row_bytes + byte[None, :]
    x_scale_at = x_scale_ptr + row_m[:, None] * scale_columns + block[None, :]
    w_scale_at = scale_ptr + row_n[:, None] * scale_columns + block[None, :]
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, row_bytes, HALF):
        if EVEN_K:
            x, w = tl.load(x_at + start), tl.load(w_at + start)
            x_scale, w_scale = tl.load(x_scale_at), tl.load(w_scale_at)
        else:
            inside = (start + byte < row_bytes)[None, :]
            x, w = tl.load(x_at + start, mask=inside, other=0), tl.load(w_at + start, mask=inside, other=0)
            here = (start // (BLOCK // 2) + block < scale_columns)[None, :]
            x_scale = tl.load(x_scale_at, mask=here, other=0.0)
            w_scale = tl.load(w_scale_at, mask=here, other=0.0)
        if INTERPRETED:  # has no such product; this one checks all around it
            dense_x = _decoded(x, x_scale, TILE_M, TILE_K, BLOCK)
            acc = tl.dot(dense_x, _decoded(w, w_scale, TILE_N, TILE_K, BLOCK).trans(), acc, input_precision="ieee")
        else:
            acc = tl.dot_scaled(x, x_scale, _E2M1, w.trans(), w_scale, _E2M1, acc)
        x_scale_at += COUNT
        w_scale_at += COUNT
    acc = finish(finish(acc, x_global_ptr, 0), global_ptr, 0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    out = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out, rounded(acc, out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _decoded(byte, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 numbers ``[ROWS, COLUMNS]`` of packed bytes and block scales."""
    LAYOUT: tl.constexpr = E8M0 if BLOCK == 32 else E4M3
    code = scale.to(tl.uint8, bitcast=True).to(tl.int32)
    byte = byte.to(tl.int32).reshape(ROWS, COLUMNS // BLOCK, BLOCK // 2)
    low, high = scaled_pair(byte, code[:, :, None], LAYOUT, 18, False)
    return tl.join(low, high).reshape(ROWS, COLUMNS) * power_of_two(18)


def plan(
    x: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Launch:
    """The launch that fills ``out`` ``[M, N]`` from packed elements, block scales and global scales."""
    m, n = out.shape
    dtype = SCALES[scheme.scale, scheme.block_shape]
    tile_m, tile_n, tile_k = (128, 128, 256) if m > 16 else (128, 64, 256)
    return Launch(
        native_kernel,
        (triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),),
        {
            "x_ptr": x[0],
            "x_scale_ptr": x[1].view(dtype),
            "x_global_ptr": x[2],
            "packed_ptr": weight[0],
            "scale_ptr": weight[1].view(dtype),
            "global_ptr": weight[2],
            "bias_ptr": bias,
            "out_ptr": out,
            "M": m,
            "N": n,
            "row_bytes": weight[0].shape[1],
            "scale_columns": weight[1].shape[1],
        },
        {
            "BLOCK": scheme.block_shape[1],
            "EVEN_K": weight[0].shape[1] % (tile_k // 2) == 0,
            "TILE_M": tile_m,
            "TILE_N": tile_n,
            "TILE_K": tile_k,
            "GROUP": 8,
        },
        256,
        {"num_stages": 3},
    )
