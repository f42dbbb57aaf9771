"""Element codes <-> bytes.

fp4, two codes a byte, the even index in the low nibble::

    byte j = code[2j] | code[2j+1] << 4

fp6, four codes in three bytes, little-endian::

    c0 | c1 << 6 | c2 << 12 | c3 << 18  =  byte0 | byte1 << 8 | byte2 << 16

fp8, one byte a code. Rows are padded to whole bytes with zero codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mxquant.schemes.formats import packed_row_bytes


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes ``[rows, columns]`` -> uint8 bytes ``[rows, packed_row_bytes(columns, bits)]``."""
    if bits == 8:
        return codes.contiguous()
    group = 2 if bits == 4 else 4
    if codes.shape[1] % group:
        codes = F.pad(codes, (0, -codes.shape[1] % group))
    codes = codes.contiguous()
    if bits == 4:
        # Both codes as one little-endian 16-bit word: low | high << 8 -> low | high << 4.
        words = codes.view(torch.int16)
        return (words | (words >> 4)).to(torch.uint8)
    quads = codes.view(codes.shape[0], -1, 4).to(torch.int32)
    words = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    return torch.stack([words & 0xFF, words >> 8 & 0xFF, words >> 16], -1).to(torch.uint8).flatten(1)


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Inverse of :func:`pack`: uint8 codes ``[rows, columns]``."""
    if packed.shape[-1] != packed_row_bytes(columns, bits):
        raise ValueError(
            f"{packed.shape[-1]} bytes a row do not hold {columns} codes of {bits} bits "
            f"({packed_row_bytes(columns, bits)} expected)"
        )
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 0xF, packed >> 4], -1).flatten(1)[:, :columns]
    triples = packed.view(packed.shape[0], -1, 3).to(torch.int32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = torch.stack([words >> shift & 0x3F for shift in (0, 6, 12, 18)], -1)
    return codes.to(torch.uint8).flatten(1)[:, :columns]
