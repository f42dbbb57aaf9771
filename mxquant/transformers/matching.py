"""Which modules of a running model a checkpoint holds packed, found and checked before loading.

Names in files need not be those of the running model: transformers renames keys for some
architectures, and adds or drops the prefix of the base model. Everything is checked against the
headers of the files, because what the loader does not find it fills with random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mxquant.checkpoint.native import ModuleEntry, ModuleTable
from mxquant.checkpoint.writer import DTYPE_NAMES
from mxquant.errors import CheckpointError
from mxquant.formats import QuantScheme
from mxquant.modules import QuantLinear
from mxquant.numerics import scale_dtype
from mxquant.transformers.architectures import NameMapper, is_plain_linear

# Tensor name -> safetensors dtype name and shape.
Headers = Mapping[str, tuple[str, tuple[int, ...]]]

PACKED = "weight"
COMPRESSED_TENSORS_PACKED = "weight_packed"


def read_headers(files: Iterable[str]) -> Headers:
    """Dtype and shape of every tensor of safetensors files. Raises ``CheckpointError`` naming a bad one."""
    from safetensors import safe_open

    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (not a mapping)
                    part = handle.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
        except Exception as error:  # SafetensorError and OSError, by version
            raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error
    return found


def find_packed(model: nn.Module, headers: Headers, table: ModuleTable, packed_name: str) -> dict[str, ModuleEntry]:
    """Modules of ``model`` that the files hold packed: runtime name -> entry under its file's name.

    Raises ``CheckpointError`` if table, files and model do not agree with each other.
    """
    mapper = NameMapper(model)
    suffix = f".{packed_name}"
    found: dict[str, ModuleEntry] = {}
    listed, lost, problems = [], [], []
    for key, (dtype, _) in headers.items():
        name = key.removesuffix(suffix)
        match = _match(table, name, getattr(model, "base_model_prefix", "")) if key != name else None
        if match is None:
            if dtype == "U8" and key != name:
                problems.append(f"{key} is packed, but the quantization config does not list it")
            continue
        listed.append(match.name)
        target = mapper(f"{name}.weight")
        if target is None:
            lost.append(name)
            continue
        entry = replace(match, name=name)
        found[target.removesuffix(".weight")] = entry
        problems += _problems(model, target.removesuffix(".weight"), entry, headers, packed_name)
    unlisted = table.unmatched(listed)
    if unlisted:
        problems.append(f"the quantization config lists {_some(unlisted)}, which the files do not hold")
    if lost and _has_gaps(model, headers, mapper):
        problems.append(f"{type(model).__name__} has no linear layer for the packed weights of {_some(lost)}")
    if problems:
        raise CheckpointError(f"{_origin(model)}: {_some(problems, '; ')}")
    return found


def replace_modules(model: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Put a :class:`QuantLinear` in the place of each named module, on its device and with its bias's dtype.

    Raises ``CheckpointError`` for modules that compute something else than a linear map.
    """
    for name, entry in entries.items():
        old: Any = model.get_submodule(name)
        if not is_plain_linear(old):
            kind = type(old).__name__
            raise CheckpointError(f"{_origin(model)}: {name} is a {kind}, not a linear layer; it cannot be packed")
        bias = old.bias
        new = QuantLinear(
            entry.shape,
            entry.scheme,
            bias=bias is not None,
            dtype=None if bias is None else bias.dtype,
            device=old.weight.device,
            stored_shape=entry.stored_shape,
            activations=entry.activations,
        )
        model.set_submodule(name, new.train(old.training))


def check_companions(model: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Make sure that the loader takes the scales where it takes the weight, after the replacement."""
    mapper = NameMapper(model)
    for target, entry in entries.items():
        for part in ("weight_scale", "weight_global_scale")[: 1 + entry.scheme.global_scale]:
            if mapper(f"{entry.name}.{part}") != f"{target}.{part}":
                raise CheckpointError(
                    f"{_origin(model)}: transformers would not load {entry.name}.{part} into {target}; "
                    "packed weights of this architecture are not supported"
                )


def table_of_compressed_tensors(headers: Headers) -> ModuleTable:
    """The quantized modules of an NVFP4 or MXFP4 checkpoint of compressed-tensors, from its tensors.

    Block lengths are those of the files, whatever the config's groups and targets say.
    """
    entries = []
    for key, (dtype, shape) in headers.items():
        name = key.removesuffix(f".{COMPRESSED_TENSORS_PACKED}")
        if name == key:
            continue
        kind, scales = headers.get(f"{name}.weight_scale", ("missing", ()))
        if dtype != "U8" or len(shape) != 2 or len(scales) != 2 or kind not in ("U8", "F8_E4M3") or not scales[1]:
            raise CheckpointError(f"{key} ({dtype} {list(shape)}, scale {kind} {list(scales)}) is not NVFP4 or MXFP4")
        columns = 2 * shape[1]
        preset = "nvfp4" if kind == "F8_E4M3" else "mxfp4"
        entries.append(ModuleEntry(name, QuantScheme.preset(preset, block=columns // scales[1]), (shape[0], columns)))
    if not entries:
        raise CheckpointError("the files hold no packed weights, though the config says compressed-tensors")
    return ModuleTable(entries)


def expected_tensors(entry: ModuleEntry, packed_name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Headers of the tensors that the files must hold for a module."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {f"{entry.name}.{packed_name}": ("U8", entry.stored_shape)}
    kind = DTYPE_NAMES[scale_dtype(entry.scheme.scale_format)]
    expected[f"{entry.name}.weight_scale"] = (kind, entry.scheme.scale_shape(entry.shape))
    if entry.scheme.global_scale:
        expected[f"{entry.name}.weight_global_scale"] = ("F32", (1,))
    return expected


def _match(table: ModuleTable, name: str, prefix: str) -> ModuleEntry | None:
    """The entry of a module, whether or not file and config agree on the base model's prefix."""
    names = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return next((entry for n in names if (entry := table.match(n)) is not None), None)


def _problems(model: nn.Module, target: str, entry: ModuleEntry, headers: Headers, packed_name: str) -> list[str]:
    problems = []
    weight: Any = getattr(model.get_submodule(target), "weight", None)
    dense = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
    if dense not in (entry.shape, entry.dense_shape):
        problems.append(f"{entry.name} is {list(entry.shape)}, but the model's is {list(dense or ())}")
    for key, (dtype, shape) in expected_tensors(entry, packed_name).items():
        if key not in headers:
            problems.append(f"tensor {key} is missing")
        elif headers[key] != (dtype, shape):
            problems.append(f"{key} is {headers[key][0]} {list(headers[key][1])}, not {dtype} {list(shape)}")
    return problems


def _has_gaps(model: nn.Module, headers: Headers, mapper: NameMapper) -> bool:
    """Whether the model has a matrix that no tensor of the files fills, and so may miss a lost one.

    Files may well hold more than the model wants, such as the head where only the base is loaded.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    present = {mapper(key) for key in headers} | {mapper(f"{key.rpartition('.')[0]}.weight") for key in headers}
    return any(p.ndim > 1 and n not in present and n not in tied for n, p in model.named_parameters())


def _origin(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)


def _some(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - 3} more" if len(items) > 3 else ""
    return separator.join(items[:3]) + more
