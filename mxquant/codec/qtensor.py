"""``QTensor``: a quantized weight matrix and everything needed to read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mxquant.codec import blocks
from mxquant.codec.numerics import decode_packed, effective_scale, scale_dtype
from mxquant.schemes.formats import QuantScheme

# Elements handled at once: small enough for a few fp32 copies to stay in the cache of two cores.
CHUNK_ELEMENTS = 1 << 18
# On other devices each step costs a launch, and memory is what limits it.
_DEVICE_CHUNK_ELEMENTS = 1 << 24


@dataclass(eq=False)
class QTensor:
    """A weight ``[out_features, in_features]`` in a block-scaled format.

    Attributes
    ----------
    packed : uint8, ``scheme.packed_shape(shape)``; rows padded to whole bytes with zero codes.
    scale : ``scheme.scale_shape(shape)``; uint8 codes (e8m0, ue5m3), float8_e4m3fn, bf16 or fp32.
    global_scale : fp32 ``[1]`` or None. It divides: ``value = element * fl32(scale / global_scale)``.
    shape : the dense shape.
    scheme : the number format.

    Raises ``ValueError`` if the parts do not belong together.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    shape: tuple[int, int]
    scheme: QuantScheme

    def __post_init__(self) -> None:
        self.shape = (int(self.shape[0]), int(self.shape[1]))
        check_parts(self.packed, self.scale, self.global_scale, self.shape, self.scheme)

    @property
    def nbytes(self) -> int:
        """Bytes held: packed elements, block scales and global scale."""
        parts = (self.packed, self.scale, self.global_scale)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def to(self, device: torch.device | str) -> QTensor:
        """The same tensor on another device."""
        moved = [None if t is None else t.to(device) for t in (self.packed, self.scale, self.global_scale)]
        return QTensor(moved[0], moved[1], moved[2], self.shape, self.scheme)  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight: one fp32 product per element, then one rounding to ``dtype``.

        This is the reference, in plain PyTorch; :func:`mxquant.dequantize` gives the same bits, faster.
        """
        return dequantize_parts(self.packed, self.scale, self.global_scale, self.shape, self.scheme, dtype)

    def __repr__(self) -> str:
        return f"QTensor(shape={self.shape}, scheme={self.scheme.text}, device={self.device}, nbytes={self.nbytes})"


def check_parts(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
) -> None:
    """Raise ``ValueError`` naming the first part that disagrees with shape and scheme."""
    expected = {
        "packed": (packed, torch.uint8, scheme.packed_shape(shape)),
        "scale": (scale, scale_dtype(scheme.scale_format), scheme.scale_shape(shape)),
    }
    for name, (tensor, dtype, size) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != size:
            raise ValueError(
                f"{name} of a {scheme.text} weight {list(shape)} must be {dtype} {list(size)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != packed.device:
            raise ValueError(f"{name} is on {tensor.device}, packed on {packed.device}; move them to one device")
    if scheme.global_scale != (global_scale is not None):
        raise ValueError(f"a {scheme.text} weight {'needs a' if scheme.global_scale else 'has no'} global scale")
    if global_scale is not None:
        if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
            found = f"{global_scale.dtype} {list(global_scale.shape)}"
            raise ValueError(f"global scale must be one fp32 number, not {found}")
        if global_scale.device != packed.device:
            raise ValueError(f"global scale is on {global_scale.device}, packed on {packed.device}")


def dequantize_parts(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The PyTorch reference of dequantization; see :meth:`QTensor.dequantize`."""
    rows, columns = shape
    block = scheme.block_shape
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    effective = effective_scale(scale, scheme.scale_format, global_scale)
    elements_at_once = CHUNK_ELEMENTS if packed.is_cpu else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements_at_once // columns // block[0]) * block[0]
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        elements = decode_packed(packed[row:stop], scheme.element_format, columns)
        if columns % block[1]:
            elements = F.pad(elements, (0, -columns % block[1]))
        scales = blocks.spread(effective[row // block[0] : -(-stop // block[0])], block, stop - row)
        values = elements.view(stop - row, -1, block[1]) * scales
        out[row:stop] = values.view(stop - row, -1)[:, :columns]
    return out
