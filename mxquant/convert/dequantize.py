"""From a quantized checkpoint back to a dense one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.damage import check_no_adapter
from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.layout import INDEX_NAME, OutputTensor
from mxquant.checkpoint.reader import Checkpoint, resolve_source
from mxquant.checkpoint.writer import DTYPE_NAMES, ShardWriter, index_json, plan_shards, shard_names
from mxquant.codec.numerics import effective_scale
from mxquant.codec.qtensor import QTensor
from mxquant.convert.card.files import restore_card
from mxquant.convert.output import (
    carry_side_files,
    check_disk_space,
    check_output,
    copy_tensor,
    open_shard,
    output_folder,
)
from mxquant.convert.pipeline import DEFAULT_SHARD_BYTES, Notify, Progress
from mxquant.errors import CheckpointError
from mxquant.ops.operators import dequantize


def dequantize_model(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> Path:
    """Write the dense checkpoint that a quantized one stands for.

    ``dtype``: of the weights that were quantized; None takes the model's own (``config.json``).
    ``notify``: called with what a user should know of the source's files.
    Everything else is copied, but for scales of inputs. Reads every format of
    :mod:`mxquant.checkpoint.formats.registry`. Raises ``CheckpointError`` for anything else, for parts
    that are missing or do not fit, and for values that are NaN or infinite.
    """
    checkpoint = Checkpoint(resolve_source(source))
    if (why := registry.why_not_decoded(checkpoint)) is not None:
        raise CheckpointError(why)
    check_no_adapter(checkpoint.folder)
    layout, config = registry.find(checkpoint), _dense_config(checkpoint.config)
    _check(checkpoint, layout)
    weights, dtype = {weight.name: weight for weight in layout.weights}, dtype or _config_dtype(config)
    out = Path(out)
    check_output(out, checkpoint, overwrite)
    if notify:
        for text in [*checkpoint.warnings, *checkpoint.side_files().warnings()]:
            notify(text)
    outputs = _outputs(checkpoint, layout, dtype)
    shards = plan_shards([[o] for o in outputs], max_shard_bytes)
    check_disk_space(out.absolute(), sum(o.nbytes for o in outputs))
    names = shard_names(len(shards))
    with output_folder(out) as folder:
        for file, shard in zip(names, shards, strict=True):
            with open_shard(folder / file, shard) as writer:
                for output in shard:
                    if output.name in weights:
                        _write(weights[output.name], checkpoint, dtype, writer)
                    else:
                        copy_tensor(checkpoint, output.name, writer)
                    if progress:
                        progress(output.name, output.parameters)
        if len(names) > 1:
            (folder / INDEX_NAME).write_text(index_json(shards))
        carry_side_files(checkpoint, folder)
        for known in registry.formats():
            if known.side_file:
                (folder / known.side_file).unlink(missing_ok=True)
        restore_card(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def _check(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raise ``CheckpointError`` if config and tensors do not agree: before any work."""
    problems = [f"the config names {name}, which has no tensor" for name in layout.unmatched[:1]]
    if not layout.weights and not layout.unlisted:
        problems.append("the config says that weights are packed, and no tensor is")
    for weight in layout.weights:
        problems += [message for _, message in weight.problems(checkpoint.tensors)]
    problems += [*layout.packed_strays(), *layout.stray_scales()]
    if problems:
        raise CheckpointError(f"{checkpoint.folder}: {problems[0]}")


def _outputs(checkpoint: Checkpoint, layout: Layout, dtype: torch.dtype) -> list[OutputTensor]:
    """The tensors of the dense checkpoint; scales of inputs are of no use in it."""
    left_out = {*layout.part_names, *layout.activation_scales}
    dense = [OutputTensor(w.name, DTYPE_NAMES[dtype], w.dense_shape) for w in layout.weights]
    others = [info for info in checkpoint.tensors.values() if info.name not in left_out]
    return dense + [OutputTensor(info.name, info.dtype, info.shape) for info in others]


def _write(weight: PackedWeight, checkpoint: Checkpoint, dtype: torch.dtype, writer: ShardWriter) -> None:
    """Decode a packed weight, matrix by matrix. Raises ``CheckpointError`` for values that are no finite numbers."""
    offset = 0
    for matrix in weight.read(checkpoint):
        q = matrix.qtensor()
        _check_global_scale(weight, q)
        dense = dequantize(q, dtype)
        _check_finite(weight, q, dense)
        writer.write(weight.name, dense.t() if weight.transposed else dense, offset)
        offset += dense.numel() * dense.element_size()


def _check_global_scale(weight: PackedWeight, q: QTensor) -> None:
    """Values may be finite whatever it is: an infinite divisor makes them zero, a negative one turns their signs."""
    divisor = q.global_scale
    if divisor is not None and not bool(((divisor > 0) & divisor.isfinite()).all()):
        raise CheckpointError(f"{weight.name}: its global scale is {float(divisor)}; it must be positive and finite")


def _check_finite(weight: PackedWeight, q: QTensor, dense: torch.Tensor) -> None:
    scales = effective_scale(q.scale, q.scheme.scale_format, q.global_scale)
    element = q.scheme.element_format
    largest = float(scales.abs().amax()) * element.max  # NaN if a scale is
    if largest <= torch.finfo(dense.dtype).max and element.bits < 8:
        return  # no code of these elements is NaN
    bad = int((~dense.isfinite()).sum())
    if bad or not scales.isfinite().all():
        raise CheckpointError(
            f"{weight.name}: {bad} values are NaN or infinite; its scales or elements are damaged, which "
            "`mxquant verify` describes"
        )


def _dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` without what it says of quantization."""
    found = {key: value for key, value in config.items() if key != "quantization_config"}
    nested = found.get("text_config")
    if isinstance(nested, dict):
        found["text_config"] = {key: value for key, value in nested.items() if key != "quantization_config"}
    return found


def _dtypes(config: dict[str, Any]) -> Iterator[str]:
    """The dtypes that a config names, its own first, then those of the models inside it."""
    yield from (str(config[key]) for key in ("dtype", "torch_dtype") if config.get(key))
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _dtypes(value)


def _config_dtype(config: dict) -> torch.dtype:  # type: ignore[type-arg]
    name = next(_dtypes(config), "float32")  # what transformers takes where nothing is said
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"the config's dtype {name!r} is not a float type; pass dtype")
    return dtype
