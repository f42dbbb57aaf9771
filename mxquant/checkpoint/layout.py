"""Names and sizes that readers and writers of checkpoints agree on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# What this library writes beside the weights of an output.
REPORT_NAME = "quantization_report.json"

# Bytes per element of each safetensors dtype.
ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_SIZES[self.dtype] * self.parameters

    @property
    def parameters(self) -> int:
        return prod(self.shape)
