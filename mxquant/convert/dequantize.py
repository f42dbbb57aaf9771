"""From a quantized checkpoint back to a dense one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mxquant.checkpoint.damage import check_no_adapter
from mxquant.checkpoint.formats import compressed_tensors, native
from mxquant.checkpoint.layout import INDEX_NAME, OutputTensor
from mxquant.checkpoint.reader import Checkpoint, TensorInfo, resolve_source
from mxquant.checkpoint.writer import DTYPE_NAMES, index_json, plan_shards, shard_names
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
from mxquant.ops.operators import QTensor
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.matching import header_problems

# How tensors end that mean nothing without the packed weight.
_PARTS = (".weight_scale", ".weight_global_scale", ".weight_packed")
# What the name of a packed tensor has that the dense one has not.
_SUFFIXES = {native.QUANT_METHOD: "", compressed_tensors.QUANT_METHOD: "_packed"}


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
    Everything else is copied. Reads mxquant's format and compressed-tensors' NVFP4 and MXFP4.
    Raises ``CheckpointError`` for anything else, and for parts that are missing or do not fit.
    """
    checkpoint = Checkpoint(resolve_source(source))
    config = dict(checkpoint.config)
    quantization = config.pop("quantization_config", None) or {}
    method = quantization.get("quant_method")
    if method not in _SUFFIXES:
        what = f"quantized by {method}, which cannot be read here" if method else "not quantized"
        raise CheckpointError(f"{checkpoint.folder} is {what}")
    check_no_adapter(checkpoint.folder)
    out = Path(out)
    check_output(out, checkpoint, overwrite)
    if notify:
        for text in [*checkpoint.warnings, *checkpoint.side_files().warnings()]:
            notify(text)
    reader = _Reader(checkpoint, method, quantization, dtype or _config_dtype(config))
    shards = plan_shards([[o] for o in reader.outputs], max_shard_bytes)
    check_disk_space(out.absolute(), sum(o.nbytes for o in reader.outputs))
    names = shard_names(len(shards))
    with output_folder(out) as folder:
        for file, shard in zip(names, shards, strict=True):
            with open_shard(folder / file, shard) as writer:
                for output in shard:
                    if output.name in reader.entries:
                        writer.write(output.name, reader.dense(output.name))
                    else:
                        copy_tensor(checkpoint, output.name, writer)
                    if progress:
                        progress(output.name, output.parameters)
        if len(names) > 1:
            (folder / INDEX_NAME).write_text(index_json(shards))
        carry_side_files(checkpoint, folder)
        restore_card(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


class _Reader:
    """The tensors of the dense checkpoint: ``outputs``, of which ``entries`` are decoded by ``dense``."""

    def __init__(self, checkpoint: Checkpoint, method: str, quantization: dict, dtype: torch.dtype):  # type: ignore[type-arg]
        self._checkpoint, self._dtype, self._suffix = checkpoint, dtype, _SUFFIXES[method]
        self.entries: dict[str, native.ModuleEntry] = {}
        self.outputs: list[OutputTensor] = []
        table = native.parse_config(quantization) if method == native.QUANT_METHOD else None
        scheme = compressed_tensors.parse_config(quantization) if table is None else None
        parts: set[str] = set()
        for info in checkpoint.tensors.values():
            entry = _entry(info, table, scheme)
            if entry is not None:
                self.entries[entry.tensor] = entry
                parts |= {info.name, f"{entry.tensor}_scale", f"{entry.tensor}_global_scale"}
                self.outputs.append(OutputTensor(entry.tensor, DTYPE_NAMES[dtype], entry.dense_shape))
        self.outputs += [
            OutputTensor(i.name, i.dtype, i.shape) for i in checkpoint.tensors.values() if i.name not in parts
        ]
        self._check(parts, [] if table is None else table.unmatched([e.name for e in self.entries.values()]))

    def _check(self, parts: set[str], unmatched: list[str]) -> None:
        """Raise ``CheckpointError`` if config and tensors do not agree: before any work."""
        checkpoint = self._checkpoint
        if unmatched:
            raise CheckpointError(f"{checkpoint.folder}: the config names {unmatched[0]}, which has no tensor")
        if not self.entries:
            raise CheckpointError(f"{checkpoint.folder}: the config says that weights are packed, and no tensor is")
        headers = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
        for entry in self.entries.values():
            if problems := header_problems(entry, headers, self._suffix):
                raise CheckpointError(f"{checkpoint.folder}: {problems[0]}")
        for name in checkpoint.tensors:
            if name not in parts and name.endswith(_PARTS):
                raise CheckpointError(f"{checkpoint.folder}: {name} is a part of a packed weight that is not there")

    def dense(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        packed = self._part(f"{name}{self._suffix}")
        scale = self._part(f"{name}_scale")
        global_scale = self._part(f"{name}_global_scale") if entry.scheme.global_scale else None
        if entry.experts is None:
            return self._matrix(entry, packed, scale, global_scale)
        try:
            parts = zip(
                packed, scale, global_scale if global_scale is not None else [None] * entry.experts, strict=True
            )
            matrices = [self._matrix(entry, p, s, None if g is None else g[None]) for p, s, g in parts]
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        return torch.stack(matrices)

    def _matrix(
        self, entry: native.ModuleEntry, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
    ) -> torch.Tensor:
        try:
            packed = packed.view(entry.scheme.packed_shape(entry.shape))
            q = QTensor(packed, scale, global_scale, entry.shape, entry.scheme)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{entry.name}: {error}") from error
        weight = q.dequantize(self._dtype)
        return weight.t().contiguous() if entry.transposed else weight

    def _part(self, name: str) -> torch.Tensor:
        if name not in self._checkpoint.tensors:
            raise CheckpointError(f"{self._checkpoint.folder}: tensor {name} is missing")
        return self._checkpoint.read(name)


def _entry(info: TensorInfo, table: native.ModuleTable | None, scheme: QuantScheme | None) -> native.ModuleEntry | None:
    """What the packed tensor ``info`` stands for; None if it is not one."""
    if table is not None:
        return table.match_tensor(info.name)
    module = info.name.removesuffix(".weight_packed")
    if module == info.name:
        return None
    assert scheme is not None
    if len(info.shape) != 2:
        raise CheckpointError(f"{info.name} ({info.dtype} {list(info.shape)}) is not a packed matrix")
    return native.ModuleEntry(module, scheme, (info.shape[0], info.shape[1] * 2))


def _config_dtype(config: dict) -> torch.dtype:  # type: ignore[type-arg]
    text = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"the config's dtype {name!r} is not a float type; pass dtype")
    return dtype
