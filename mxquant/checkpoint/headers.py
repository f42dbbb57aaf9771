"""The headers of safetensors files: dtypes and shapes of tensors by name, checked against the size of the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mxquant.checkpoint.damage import what_file
from mxquant.checkpoint.layout import ITEM_SIZES
from mxquant.errors import CheckpointError

# What safetensors itself accepts.
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor: safetensors dtype name (``BF16``), shape and file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


# The tensors of a checkpoint by name; all that can be known of them without reading their bytes.
Tensors = Mapping[str, TensorInfo]


class HeaderError(CheckpointError):
    """What is wrong with a safetensors file, as the end of a sentence that begins with the file's name."""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises ``HeaderError`` for a file that is not whole: a header that is cut short or damaged, tensors
    that overlap or leave gaps, bytes that are missing or too many, dtypes that are not known.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                what = f": {found}" if (found := what_file(file)) else ""
                raise HeaderError(f"has no whole safetensors header in its {size} bytes{what}")
            text = opened.read(length)
    except OSError as error:
        raise HeaderError(f"cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ranges = {name: _range(name, entry) for name, entry in header.items()}
        found_shapes = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HeaderError(f"has a damaged safetensors header: {error}") from error
    end = 0
    order = sorted(ranges, key=lambda name: ranges[name])
    for name in order:
        first, last = ranges[name]
        if first != end:
            raise HeaderError(f"has a damaged safetensors header: {name} does not follow the tensor before it")
        end = last
    if size != 8 + length + end:
        more = size - 8 - length - end
        raise HeaderError(f"is {abs(more)} bytes too {'long' if more > 0 else 'short'}")
    return {name: TensorInfo(name, *found_shapes[name], ranges[name][1] - ranges[name][0], file) for name in order}


def _range(name: str, entry: Any) -> tuple[int, int]:
    first, last = entry["data_offsets"]
    if entry["dtype"] not in ITEM_SIZES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
    if last - first != prod(entry["shape"]) * ITEM_SIZES[entry["dtype"]]:
        raise ValueError(f"{name} takes {last - first} bytes, which {entry['dtype']} {entry['shape']} does not")
    return int(first), int(last)
