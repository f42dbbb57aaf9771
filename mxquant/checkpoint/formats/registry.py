"""The on-disk formats of packed weights that are known: one line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mxquant.checkpoint.formats.base import ACTIVATION_SCALES, Layout, PackedFormat
from mxquant.checkpoint.formats.base import UnknownFormatError as UnknownFormatError
from mxquant.checkpoint.formats.compressed_tensors import CompressedTensorsFormat
from mxquant.checkpoint.formats.gpt_oss import GptOssFormat
from mxquant.checkpoint.formats.modelopt import ModelOptFormat
from mxquant.checkpoint.formats.native import FORMAT as NATIVE
from mxquant.checkpoint.formats.packed import GLOBAL_SCALE, PACKED, SCALE
from mxquant.checkpoint.formats.quark import QuarkFormat
from mxquant.checkpoint.headers import TensorInfo, Tensors
from mxquant.checkpoint.layout import FLOAT_DTYPES
from mxquant.checkpoint.reader import Checkpoint
from mxquant.errors import CheckpointError

_FORMATS: list[PackedFormat] = [
    NATIVE,
    CompressedTensorsFormat(),
    ModelOptFormat(),
    QuarkFormat(),
    GptOssFormat(),
]


def formats() -> list[PackedFormat]:
    """All formats that are known."""
    return list(_FORMATS)


def register(format: PackedFormat) -> None:
    """Make a format known. Raises ``ValueError`` if its ``quant_method`` is taken."""
    if any(known.method == format.method for known in _FORMATS):
        raise ValueError(f"there is a format of quant_method {format.method} already")
    _FORMATS.append(format)


def unregister(format: PackedFormat) -> None:
    """Undo :func:`register`."""
    _FORMATS.remove(format)


def get(method: str | None) -> PackedFormat:
    """The format of a ``quant_method``. Raises ``UnknownFormatError`` if it is not known."""
    for known in _FORMATS:
        if known.method == method:
            return known
    raise UnknownFormatError(f"quantization by {method} is not supported; supported are {_known()}")


def knows(method: str | None) -> bool:
    """Whether there is a format of that ``quant_method``."""
    return any(known.method == method for known in _FORMATS)


def quantization_in(config: dict[str, Any]) -> dict[str, Any] | None:
    """What ``config.json`` says of quantization, of the model or of the language model in it; None if dense."""
    nested = config.get("text_config")
    nested = nested if isinstance(nested, dict) else {}
    found = config.get("quantization_config") or nested.get("quantization_config")
    return found if isinstance(found, dict) and found else None


def quantization_of(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What a checkpoint says of its quantization, wherever its writer puts that; None if it is dense.

    Raises ``CheckpointError`` for a side file that cannot be read.
    """
    found = quantization_in(config)
    for known in _FORMATS:
        said = known.describe(folder)
        if said is not None:
            found = {**said, **(found or {})}
    return found


def method_of(config: dict[str, Any], folder: Path) -> str | None:
    """The ``quant_method`` of a checkpoint, be its description readable or not; None if it is dense."""
    found = quantization_in(config)
    if found is not None:
        return str(found.get("quant_method", "unknown method"))
    return next((f.method for f in _FORMATS if f.side_file and (folder / f.side_file).exists()), None)


def find(checkpoint: Checkpoint) -> Layout:
    """The packed weights of a checkpoint.

    Raises ``UnknownFormatError`` for an unsupported method or format, and
    ``CheckpointError`` for a config that cannot be read.
    """
    config = quantization_of(checkpoint.config, checkpoint.folder)
    if config is not None and not knows(str(config.get("quant_method"))):
        method = config.get("quant_method", "an unknown method")
        raise UnknownFormatError(f"{checkpoint.folder} is quantized by {method}; supported are {_known()}")
    return layout_of(config, checkpoint.tensors)


def layout_of(config: dict[str, Any] | None, tensors: Tensors, prefix: str = "") -> Layout:
    """The packed weights among tensors, by a ``quantization_config``, and what belongs to none of them.

    ``prefix``: see :meth:`PackedFormat.read`. Raises as :func:`find` does.
    """
    layout = Layout(None) if config is None else _read(config, tensors, prefix)
    parts = layout.part_names
    for info in tensors.values():
        if info.name in parts:
            continue
        if re.search(ACTIVATION_SCALES, info.name):
            layout.activation_scales.append(info.name)
        elif _looks_packed(info, tensors):
            layout.unlisted.append(info.name)
    return layout


def _read(config: dict[str, Any], tensors: Tensors, prefix: str) -> Layout:
    known = get(config.get("quant_method"))
    try:
        return known.read(config, tensors, prefix)
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
        raise CheckpointError(f"the quantization_config ({known.method}) is malformed: {error}") from error


def why_not_decoded(checkpoint: Checkpoint) -> str | None:
    """Why a quantized checkpoint cannot be made dense, if it cannot: the sentence that `dequantize` refuses with."""
    try:
        layout = find(checkpoint)
    except CheckpointError as error:
        return str(error)
    if layout.format is None:
        return f"{checkpoint.folder} is not quantized"
    why = layout.format.why_not_dense(quantization_of(checkpoint.config, checkpoint.folder) or {})
    return why and f"{checkpoint.folder} ({layout.format.method}) cannot be made dense: {why}"


def way_to_dense(folder: Path | None) -> str:
    """The end of a sentence that asks for a dense model: how to make one of the checkpoint, where that can be done."""
    try:
        can = folder is not None and why_not_decoded(Checkpoint(folder)) is None
    except CheckpointError:
        can = False
    return ", or make one with `mxquant dequantize`" if can else ""


def _known() -> str:
    return ", ".join(known.method for known in _FORMATS)


def _looks_packed(info: TensorInfo, tensors: Tensors) -> bool:
    """Whether a tensor that nothing claims must be a part of a packed weight."""
    packed = {known.suffixes[PACKED] for known in _FORMATS} - {""}
    if info.name.endswith(tuple(f".weight{suffix}" for suffix in packed)):
        return True
    if info.dtype == "U8" and info.name.endswith(".weight"):
        return True
    scales = {known.suffixes[role] for known in _FORMATS for role in (SCALE, GLOBAL_SCALE) if role in known.suffixes}
    for suffix in sorted(packed | scales, key=len, reverse=True):
        base = info.name.removesuffix(suffix)
        if base == info.name:
            continue
        owner = tensors.get(base)
        if base.endswith(".weight"):  # scales of fp8 and int8 weights are another quantization's
            return owner is None or owner.dtype in (*FLOAT_DTYPES, "U8")
        return info.dtype in ("U8", "F8_E4M3") and (owner is None or owner.dtype == "U8")
    return False
