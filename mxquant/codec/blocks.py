"""Cutting a weight ``[rows, columns]`` into blocks.

A block of ``r x c`` elements is a tile; ``r = 1`` gives the 1-D blocks along the input features.
Rows and columns that do not divide are padded with zeros, which change neither a block's largest
magnitude nor its error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def split(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``[rows, columns]`` -> ``[row_blocks, r, column_blocks, c]``, a view where nothing is padded."""
    r, c = block
    rows, columns = x.shape
    if rows % r or columns % c:
        x = F.pad(x, (0, -columns % c, 0, -rows % r))
    return x.view(x.shape[0] // r, r, x.shape[1] // c, c)


def amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block: ``[row_blocks, r, column_blocks, c]`` -> ``[row_blocks, column_blocks]``.

    NaN wins, so one non-finite element shows in its block's maximum.
    """
    x = blocks.abs()
    # Halving by slices is several times faster than a reduction over a short last dimension.
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        y = torch.maximum(x[..., :half], x[..., half : 2 * half])
        x = torch.cat([y, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else y
    return x.squeeze(-1).amax(1)


def as_columns(blocks: torch.Tensor) -> torch.Tensor:
    """``[row_blocks, r, column_blocks, c]`` -> ``[r * c, row_blocks * column_blocks]``, a view where it can be."""
    row_blocks, r, column_blocks, c = blocks.shape
    return blocks.permute(1, 3, 0, 2).reshape(r * c, row_blocks * column_blocks)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension in one fixed order of fp32 additions, the same on every device."""
    while x.shape[0] > 1:
        rest = x.shape[0] // 2
        y = x[:rest] + x[-rest:]
        x = torch.cat([y, x[rest : rest + 1]]) if x.shape[0] % 2 else y
    return x[0]


def spread(scales: torch.Tensor, block: tuple[int, int], rows: int) -> torch.Tensor:
    """Per-block values ``[row_blocks, column_blocks]`` -> ``[rows, column_blocks, 1]`` for broadcasting."""
    if block[0] > 1:
        scales = scales.repeat_interleave(block[0], 0)
    return scales[:rows].unsqueeze(-1)
