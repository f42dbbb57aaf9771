"""Whether the numbers of a checkpoint can be right: scales, element codes, padding, dense tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mxquant.checkpoint.formats.packed import Matrix, PackedWeight
from mxquant.checkpoint.layout import FLOAT_DTYPES
from mxquant.checkpoint.reader import Checkpoint
from mxquant.codec import blocks
from mxquant.codec.numerics import decode_scale, element_table
from mxquant.codec.packing import unpack
from mxquant.inspection.faults import Verification
from mxquant.inspection.summary import Steps
from mxquant.schemes.formats import ElementFormat

_CHUNK = 1 << 22


def check_packed(checkpoint: Checkpoint, weights: Iterable[PackedWeight], found: Verification, advance: Steps) -> None:
    """Faults of scales and element codes; a sentence for each kind and weight, with how many there are."""
    for weight in weights:
        counts: dict[tuple[str, str], int] = {}
        for matrix in weight.read(checkpoint):
            for fault in _faults(matrix):
                counts[fault] = counts.get(fault, 0) + 1
        for (kind, message), matrices in counts.items():
            more = f" (in {matrices} of {weight.matrices} experts)" if weight.experts is not None else ""
            found.add(kind, f"{weight.name}: {message}{more}")
        advance(weight.name)


def _faults(matrix: Matrix) -> list[tuple[str, str]]:
    """Kind and sentence of what is wrong with one matrix."""
    found = []
    divisor = matrix.global_scale
    if divisor is not None and not bool(((divisor > 0) & divisor.isfinite()).all()):
        # Then no block scale means anything.
        return [("scales", f"its global scale is {float(divisor)}")]
    values = decode_scale(matrix.scale.contiguous(), matrix.weight.scheme.scale_format)
    invalid = int((~values.isfinite() | (values < 0)).sum())
    if invalid:
        found.append(("scales", f"block scales that are NaN, infinite or negative: {invalid}"))
    zero = overflow = codes = padding = 0
    for start, stop in matrix.chunks():
        counts = _count(matrix, start, stop)
        zero, overflow = zero + counts[0], overflow + counts[1]
        codes, padding = codes + counts[2], padding + counts[3]
    if zero:
        found.append(("scales", f"block scales that are zero where elements are not: {zero}"))
    if overflow:
        found.append(("scales", f"blocks with values too large for fp32: {overflow}"))
    if codes:
        found.append(("values", f"element codes that are NaN or past the largest: {codes}"))
    if padding:
        found.append(("values", f"rows with codes in the padding: {padding}"))
    return found


def _count(matrix: Matrix, start: int, stop: int) -> tuple[int, int, int, int]:
    """Of some rows: blocks with a zero scale and elements that are not, blocks that overflow, codes that are no
    numbers, rows with something in their padding."""
    scheme, columns = matrix.weight.scheme, matrix.weight.shape[1]
    element, height = scheme.element_format, scheme.block_shape[0]
    packed = matrix.packed[start:stop].contiguous()
    magnitude, padding = _magnitudes(packed, element, columns)
    largest = blocks.amax(blocks.split(magnitude, scheme.block_shape))
    bad = int((magnitude > element.max_code).sum())
    scale = matrix.effective(start // height, -(-stop // height))
    alive = (largest > 0) & scale.isfinite()
    table = element_table(element.name)
    value = table[largest.clamp(max=element.max_code).to(torch.int32)] * scale
    zero = int((alive & (scale == 0)).sum())
    overflow = int((alive & ~value.isfinite()).sum())
    return zero, overflow, bad, padding


def _magnitudes(packed: torch.Tensor, element: ElementFormat, columns: int) -> tuple[torch.Tensor, int]:
    """Codes without their signs, uint8 ``[rows, columns]``, and how many rows have others after them."""
    capacity = packed.shape[1] * 8 // element.bits
    codes = unpack(packed, element.bits, capacity)
    padding = int((codes[:, columns:] != 0).any(1).sum()) if capacity > columns else 0
    return codes[:, :columns] & ((1 << (element.bits - 1)) - 1), padding


def check_dense(checkpoint: Checkpoint, names: Iterable[str], found: Verification, advance: Steps) -> None:
    """Faults of dense float tensors: NaN and infinities."""
    count = 0
    for name in names:
        info = checkpoint.tensors[name]
        if info.dtype not in FLOAT_DTYPES:
            continue
        count += 1
        flat, bad = checkpoint.read(name).reshape(-1), 0
        for start in range(0, flat.numel(), _CHUNK):
            bad += int((~flat[start : start + _CHUNK].isfinite()).sum())
        if bad:
            found.add("values", f"{name}: values that are NaN or infinite: {bad}")
        advance(name)
    found.checked["other tensors"] = count
