"""Which modules of a running model a checkpoint holds packed, found and checked before loading.

Names in files need not be those of the running model: transformers renames keys for some
architectures, and adds or drops the prefix of the base model. Everything is checked against the
headers of the files, because what the loader does not find it fills with random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxquant.checkpoint import pytorch
from mxquant.checkpoint.damage import why_not_whole
from mxquant.checkpoint.formats.native import ModuleEntry, ModuleTable
from mxquant.checkpoint.writer import DTYPE_NAMES
from mxquant.codec.numerics import scale_dtype
from mxquant.errors import CheckpointError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.architectures import NameMapper, Parameter, inventory
from mxquant.transformers.experts import pack_experts
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Layout, Piece, Place, entry_of, layout, problems_of
from mxquant.transformers.parts import is_plain_linear

# Tensor name -> safetensors dtype name and shape.
Headers = Mapping[str, tuple[str, tuple[int, ...]]]

SCALES = ("_scale", "_global_scale")
PACKED = "weight"
COMPRESSED_TENSORS_PACKED = "weight_packed"


@dataclass
class Packed:
    """What of a model is packed, or is going to be.

    ``modules``: linear layers, runtime name -> entry under its file's name. ``experts``: parameters
    of experts, runtime name -> entry of all its matrices, whichever tensors hold them in the files.
    ``tensors``: dense name of each tensor in the files -> that of the model's tensor it goes to.
    """

    modules: dict[str, ModuleEntry] = field(default_factory=dict)
    experts: dict[str, ModuleEntry] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)

    def scheme_of(self, tensor: str) -> QuantScheme:
        """The scheme of a tensor of the model."""
        return (self.experts.get(tensor) or self.modules[tensor.removesuffix(".weight")]).scheme


def read_headers(files: Iterable[str]) -> Headers:
    """Dtype and shape of every tensor of safetensors or ``.bin`` files. Raises ``CheckpointError`` naming a bad one."""
    from safetensors import safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        if file.endswith(".bin"):
            tensors = pytorch.read_file(Path(file))
            found |= {name: (pytorch.DTYPE_NAMES.get(t.dtype, "?"), tuple(t.shape)) for name, t in tensors.items()}
            continue
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (not a mapping)
                    part = handle.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
        except Exception as error:  # SafetensorError and OSError, by version
            why = why_not_whole(Path(file), error)
            raise CheckpointError(f"{file}: not a whole safetensors file: {why}") from error
    return found


def find_packed(model: nn.Module, headers: Headers, table: ModuleTable, packed_name: str) -> Packed:
    """Modules and experts of ``model`` that the files hold packed.

    Raises ``CheckpointError`` if table, files and model do not agree with each other.
    """
    mapper = NameMapper(model)
    experts = expert_parameters(model)
    suffix = packed_name.removeprefix(PACKED)
    found = Packed()
    pieces: dict[str, list[Piece]] = defaultdict(list)
    listed, lost, problems = [], [], []
    for key, (dtype, _) in headers.items():
        name = key.removesuffix(suffix) if suffix else key
        match = _match(table, name, getattr(model, "base_model_prefix", "")) if key.endswith(suffix) else None
        if match is None:
            if dtype == "U8" and key.endswith(f".{packed_name}"):
                problems.append(f"{key} is packed, but the quantization config does not list it")
            continue
        listed.append(match.name)
        place = mapper.place(name)
        entry = replace(match, name=name if match.experts is not None else name.removesuffix(".weight"))
        if place is not None and place.parameter in experts:
            found.tensors[name] = place.parameter
            problems += header_problems(entry, headers, suffix)
            problems += _place(pieces[place.parameter], place, entry, experts[place.parameter])
        elif place is not None and place.is_whole and entry.experts is None:
            found.tensors[name] = place.parameter
            found.modules[place.parameter.removesuffix(".weight")] = entry
            problems += _shape_problems(model, place.parameter.removesuffix(".weight"), entry)
            problems += header_problems(entry, headers, suffix)
        else:
            lost.append(name.removesuffix(".weight"))
    problems += _unfilled(model, mapper, headers, table, suffix)
    unlisted = table.unmatched(listed)
    if unlisted:
        problems.append(f"the quantization config lists {_some(unlisted)}, which the files do not hold")
    if lost and _has_gaps(model, headers, mapper):
        problems.append(f"{type(model).__name__} has no linear layer for the packed weights of {_some(lost)}")
    if not problems:
        for name, made_of in pieces.items():
            count = experts[name].shape[0]
            problems += problems_of(name, count, made_of)
            found.experts[name] = entry_of(made_of, count)
    if problems:
        raise CheckpointError(f"{_origin(model)}: {_some(problems, '; ')}")
    return found


def expert_parameters(model: nn.Module) -> dict[str, Parameter]:
    """The parameters that hold the matrices of experts, by name."""
    return {p.name: p for p in inventory(model) if p.kind is Kind.EXPERTS}


def _place(pieces: list[Piece], place: Place, entry: ModuleEntry, parameter: Parameter) -> list[str]:
    """Add what a packed tensor is of a parameter to ``pieces``; or what is wrong with it."""
    experts, rows, columns = parameter.shape
    held = layout(place, (experts, rows, columns), parameter.transposed, entry.dense_shape)
    if not isinstance(held, Layout):
        return [f"{entry.tensor} holds {held}"]
    if (held.matrix, held.experts) != (entry.shape, entry.experts):
        return [f"{entry.name} is {list(entry.dense_shape)}, but the model's is {list(held.shape)}"]
    pieces.append(Piece(entry.tensor, place, held, entry.scheme, entry.activations))
    return []


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


def replace_experts(model: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Have the named parameters of experts packed."""
    by_module: dict[str, dict[str, ModuleEntry]] = defaultdict(dict)
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        by_module[module][leaf] = entry
    for module, found in by_module.items():
        pack_experts(model.get_submodule(module), found)


def check_companions(model: nn.Module, packed: Packed, conversions: Iterable[Any]) -> None:
    """Make sure that the loader, by its rules ``conversions``, takes the scales where it takes the weight."""
    mapper = NameMapper(model, conversions)
    for name, target in packed.tensors.items():
        for part in SCALES[: 1 + packed.scheme_of(target).global_scale]:
            if mapper.target(f"{name}{part}") != f"{target}{part}":
                raise CheckpointError(
                    f"{_origin(model)}: transformers would not load {name}{part} into {target.rpartition('.')[0]}; "
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
        if kind == "missing":
            raise CheckpointError(f"tensor {name}.weight_scale is missing")
        columns = 2 * shape[-1] if shape else 0
        fits = len(shape) == len(scales) == 2 and shape[0] == scales[0] and columns // max(1, scales[1]) >= 2
        if dtype != "U8" or kind not in ("U8", "F8_E4M3") or not fits:
            raise CheckpointError(f"{key} ({dtype} {list(shape)}, scale {kind} {list(scales)}) is not NVFP4 or MXFP4")
        preset = "nvfp4" if kind == "F8_E4M3" else "mxfp4"
        entries.append(ModuleEntry(name, QuantScheme.preset(preset, block=columns // scales[1]), (shape[0], columns)))
    packed = {entry.name for entry in entries}
    for key in headers:
        module, _, leaf = key.rpartition(".")
        if leaf in ("weight_scale", "weight_global_scale") and module not in packed:
            raise CheckpointError(f"tensor {module}.{COMPRESSED_TENSORS_PACKED} is missing, which {key} belongs to")
    if not entries:
        raise CheckpointError("the files hold no packed weights, though the config says compressed-tensors")
    return ModuleTable(entries)


def expected_tensors(entry: ModuleEntry, suffix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Headers of the tensors that the files must hold for an entry; ``suffix``: of the packed tensor's name."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {f"{entry.tensor}{suffix}": ("U8", entry.stored_shape)}
    kind = DTYPE_NAMES[scale_dtype(entry.scheme.scale_format)]
    expected[f"{entry.tensor}_scale"] = (kind, entry.scale_shape)
    if entry.scheme.global_scale:
        expected[f"{entry.tensor}_global_scale"] = ("F32", entry.global_scale_shape)
    return expected


def _match(table: ModuleTable, name: str, prefix: str) -> ModuleEntry | None:
    """The entry of a tensor, whether or not file and config agree on the base model's prefix."""
    names = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return next((entry for n in names if (entry := table.match_tensor(n)) is not None), None)


def _shape_problems(model: nn.Module, target: str, entry: ModuleEntry) -> list[str]:
    weight: Any = getattr(model.get_submodule(target), "weight", None)
    dense = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
    if dense in (entry.shape, entry.dense_shape):
        return []
    return [f"{entry.name} is {list(entry.shape)}, but the model's is {list(dense or ())}"]


def _unfilled(model: nn.Module, mapper: NameMapper, headers: Headers, table: ModuleTable, suffix: str) -> list[str]:
    """Weights that the table lists and the files do not hold: those of other layers may match the same pattern."""
    names = [key.removesuffix(suffix) if suffix else key for key in headers]
    prefix = getattr(model, "base_model_prefix", "")
    missing = mapper.missing(names, inventory(model))
    return [f"tensor {name}{suffix} is missing" for name in missing if _match(table, name, prefix) is not None]


def header_problems(entry: ModuleEntry, headers: Headers, suffix: str) -> list[str]:
    """What is missing of an entry's tensors in the files, or is not as it says."""
    problems = []
    for key, (dtype, shape) in expected_tensors(entry, suffix).items():
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
