"""Launches of ``y = x W^T + bias``: which kernel, which tiles, and the second step of a split sum."""

from __future__ import annotations

import torch
import triton

from mxquant.kernels.triton.configs import Config
from mxquant.kernels.triton.decode import EXPONENTS, LAYOUTS
from mxquant.kernels.triton.gemv import gemv_kernel, gemv_words_kernel
from mxquant.kernels.triton.launch import Launch
from mxquant.kernels.triton.matmul import matmul_kernel, reduce_kernel
from mxquant.schemes.formats import QuantScheme


def terms(dtype: torch.dtype, scheme: QuantScheme) -> int:
    """How many numbers of the tensor core's dtype an activation is split into."""
    if dtype == torch.float32:
        return 3
    return 2 if dtype == torch.float16 and scheme.scale_format.exponent_only else 1


def words(packed: torch.Tensor, scheme: QuantScheme) -> bool:
    """Whether packed rows are 32-bit words with eight weights of one block each."""
    c = scheme.block_shape[1]
    return packed.shape[1] % 4 == 0 and packed.storage_offset() % 4 == 0 and c % 8 == 0 and c & (c - 1) == 0


def plan(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
    config: Config,
) -> list[Launch]:
    """The launches, in order, that fill ``out`` ``[M, N]``.

    ``x``: ``[M, K]`` with contiguous rows. The only allocation is the fp32 workspace ``[splits, M, N]``
    of a product that is cut along K.
    """
    (m, k), n = x.shape, packed.shape[0]
    steps = triton.cdiv(triton.cdiv(k, config.k), config.splits)
    split = config.splits > 1
    target = torch.empty(config.splits, m, n, dtype=torch.float32, device=x.device) if split else out
    layout, parts = LAYOUTS[scheme.scale], terms(x.dtype, scheme)
    fp16 = config.m > 1 and parts == 1 and x.dtype == torch.float16
    exponent = EXPONENTS[layout, fp16]
    arguments = {
        "x_ptr": x,
        "packed_ptr": packed,
        "scale_ptr": scale.view(torch.uint8),
        "global_ptr": global_scale,
        "bias_ptr": bias,
        "out_ptr": target,
        "M": m,
        "N": n,
        "K": k,
        "x_stride": x.stride(0),
        "row_bytes": packed.shape[1],
        "scale_columns": scale.shape[1],
        "steps": steps,
    }
    constants = {
        "BLOCK_ROWS": scheme.block_shape[0],
        "BLOCK_COLUMNS": scheme.block_shape[1],
        "LAYOUT": layout,
        "EXPONENT": exponent,
        "EVEN_K": k == config.splits * steps * config.k,
        "SPLIT": split,
        "TILE_N": config.n,
        "TILE_K": config.k,
    }
    how = config.threads, {"num_stages": config.stages}
    if config.m == 1:
        del arguments["M"], arguments["x_stride"]
        kernel = gemv_kernel
        if words(packed, scheme):
            kernel, exponent = gemv_words_kernel, 0
            arguments["packed_ptr"] = packed.view(torch.int32)
            del constants["EXPONENT"]
        launches = [Launch(kernel, (triton.cdiv(n, config.n), config.splits), arguments, constants, *how)]
    else:
        tiles = triton.cdiv(m, config.m) * triton.cdiv(n, config.n)
        constants |= {"TERMS": parts, "TILE_M": config.m, "GROUP": config.group}
        launches = [Launch(matmul_kernel, (tiles, config.splits), arguments, constants, *how)]
    if split:
        launches.append(_reduce(target, global_scale, bias, out, exponent))
    return launches


def _reduce(
    parts: torch.Tensor, global_scale: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor, exponent: int
) -> Launch:
    tile = 512
    return Launch(
        reduce_kernel,
        (triton.cdiv(out.numel(), tile),),
        {
            "parts_ptr": parts,
            "global_ptr": global_scale,
            "bias_ptr": bias,
            "out_ptr": out,
            "size": out.numel(),
            "N": out.shape[1],
            "splits": parts.shape[0],
        },
        {"EXPONENT": exponent, "TILE": tile},
        128,
    )
