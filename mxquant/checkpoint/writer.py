"""Writing safetensors shards whose layout is known before any byte of data is.

The header of a shard is made from names, dtypes and shapes alone, then each tensor's bytes are put
at their place, a few rows at a time if need be, so memory does not grow with the model. A shard
carries a temporary name until it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path

import torch

from mxquant.checkpoint.layout import ITEM_SIZES, SINGLE_NAME, OutputTensor
from mxquant.errors import CheckpointError

DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


def plan_shards(groups: list[list[OutputTensor]], max_bytes: int) -> list[list[OutputTensor]]:
    """Distribute tensors over shards of at most ``max_bytes``, in order; a group stays together."""
    shards: list[list[OutputTensor]] = []
    size = 0
    for group in groups:
        group_bytes = sum(t.nbytes for t in group)
        if not shards or size + group_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].extend(group)
        size += group_bytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names as transformers expects them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_json(shards: list[list[OutputTensor]]) -> str:
    """The text of the shard index."""
    names = shard_names(len(shards))
    weight_map = {t.name: name for shard, name in zip(shards, names, strict=True) for t in shard}
    total = sum(t.nbytes for shard in shards for t in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def shard_header(tensors: list[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a shard, and the offset of each tensor in what follows them.

    Tensors of larger items come first, so that every tensor is aligned to its item size.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    offset = 0
    for t in sorted(tensors, key=lambda t: -ITEM_SIZES[t.dtype]):
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offsets[t.name] = offset
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets


def shard_bytes(tensors: list[OutputTensor]) -> int:
    """The size of the file of a shard."""
    return len(shard_header(tensors)[0]) + sum(t.nbytes for t in tensors)


class ShardWriter:
    """Writes one shard; ``write`` in any order, then ``finish`` gives it its name."""

    def __init__(self, path: Path, tensors: list[OutputTensor]):
        self._path, self._temporary = path, path.with_name(path.name + ".partial")
        header, self._offsets = shard_header(tensors)
        self._missing = {t.name: t.nbytes for t in tensors}
        self._data_start = len(header)
        self._file = open(self._temporary, "wb")  # noqa: SIM115 (lives as long as the writer)
        try:
            # A full disk shows now, not after minutes of work.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, self._data_start + sum(self._missing.values()))
            self._file.write(header)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, data: torch.Tensor, offset: int = 0) -> None:
        """Put the bytes of ``data`` at byte ``offset`` of tensor ``name``."""
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._data_start + self._offsets[name] + offset)
        self._file.write(raw.numpy().data)
        self._missing[name] -= raw.numel()

    def finish(self) -> None:
        """Check that every tensor was written whole, and rename the file."""
        incomplete = [name for name, missing in self._missing.items() if missing]
        if incomplete:
            self.abort()
            raise CheckpointError(f"{self._path.name}: tensor {incomplete[0]} was not written completely")
        self._file.close()
        os.replace(self._temporary, self._path)

    def abort(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):  # what is still to be written may not fit on the disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)
