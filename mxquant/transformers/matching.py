"""Which modules of a running model a checkpoint holds packed, found and checked before loading.

Names in files need not be those of the running model: transformers renames keys for some
architectures, and adds or drops the prefix of the base model. Everything is checked against the
headers of the files, because what the loader does not find it fills with random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxquant.checkpoint import pytorch
from mxquant.checkpoint.formats import native, registry
from mxquant.checkpoint.formats.native import ModuleEntry, entry_of
from mxquant.checkpoint.formats.packed import GLOBAL_SCALE, PACKED, SCALE, PackedWeight
from mxquant.checkpoint.headers import TensorInfo, Tensors
from mxquant.checkpoint.reader import read_safetensors
from mxquant.errors import CheckpointError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.architectures import NameMapper, Parameter, inventory
from mxquant.transformers.experts import pack_experts
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Layout, Piece, Place, layout, problems_of
from mxquant.transformers.mixtures import entry_of as entry_of_pieces
from mxquant.transformers.parts import is_plain_linear

# How the names of scales follow from that of what they scale, in a model as in our own files.
SCALES = tuple(native.FORMAT.suffixes[role] for role in (SCALE, GLOBAL_SCALE))


@dataclass
class Packed:
    """What of a model is packed, or is going to be.

    ``modules``: linear layers, runtime name -> entry under its file's name. ``experts``: parameters
    of experts, runtime name -> entry of all its matrices, whichever tensors hold them in the files.
    ``tensors``: dense name of each tensor in the files -> that of the model's tensor it goes to.
    ``weights``: what the files hold packed already.
    """

    modules: dict[str, ModuleEntry] = field(default_factory=dict)
    experts: dict[str, ModuleEntry] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    weights: list[PackedWeight] = field(default_factory=list)

    def scheme_of(self, tensor: str) -> QuantScheme:
        """The scheme of a tensor of the model."""
        return (self.experts.get(tensor) or self.modules[tensor.removesuffix(".weight")]).scheme


def read_headers(files: Iterable[str]) -> dict[str, TensorInfo]:
    """Every tensor of safetensors or ``.bin`` files, by name. Raises ``CheckpointError`` naming a bad one."""
    found: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        if file.suffix != ".bin":
            found |= read_safetensors(file)
            continue
        for name, t in pytorch.read_file(file).items():
            kind = pytorch.DTYPE_NAMES.get(t.dtype, "?")
            found[name] = TensorInfo(name, kind, tuple(t.shape), t.nbytes, file)
    return found


def find_packed(model: nn.Module, tensors: Tensors, config: dict[str, Any]) -> Packed:
    """Modules and experts of ``model`` that the files hold packed, by their ``quantization_config``.

    Raises ``CheckpointError`` if config, files and model do not agree with each other.
    """
    mapper = NameMapper(model)
    experts = expert_parameters(model)
    contents = registry.layout_of(config, tensors, getattr(model, "base_model_prefix", ""))
    found = Packed(weights=contents.weights)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    lost: list[str] = []
    problems = contents.packed_strays()
    for weight in contents.weights:
        place, entry = mapper.place(weight.name), entry_of(weight)
        if place is not None and place.parameter in experts:
            found.tensors[weight.name] = place.parameter
            problems += _part_problems(weight, tensors)
            problems += _place(pieces[place.parameter], place, entry, experts[place.parameter])
        elif place is not None and place.is_whole and entry.experts is None:
            found.tensors[weight.name] = place.parameter
            found.modules[place.parameter.removesuffix(".weight")] = entry
            problems += _shape_problems(model, place.parameter.removesuffix(".weight"), entry)
            problems += _part_problems(weight, tensors)
        else:
            lost.append(weight.module)
    dense = {*tensors, *(weight.name for weight in contents.weights)}
    missing = [name for name in mapper.missing(dense, inventory(model)) if contents.lists(name)]
    problems += [f"tensor {name} is missing" for name in missing]
    if contents.unmatched:
        problems.append(f"the quantization config lists {_some(contents.unmatched)}, which the files do not hold")
    if not contents.weights:
        problems.append("the files hold no packed weights, though the quantization config says that they do")
    if lost and _has_gaps(model, tensors, mapper):
        problems.append(f"{type(model).__name__} has no linear layer for the packed weights of {_some(lost)}")
    if not problems:
        for name, made_of in pieces.items():
            count = experts[name].shape[0]
            problems += problems_of(name, count, made_of)
            found.experts[name] = entry_of_pieces(made_of, count)
    problems += contents.stray_scales()
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
    for weight in packed.weights:
        if weight.name not in packed.tensors:
            continue
        target = packed.tensors[weight.name]
        for role, part in weight.parts.items():
            if role != PACKED and mapper.target(part.name) != f"{target}{native.FORMAT.suffixes[role]}":
                raise CheckpointError(
                    f"{_origin(model)}: transformers would not load {part.name} into {target.rpartition('.')[0]}; "
                    "packed weights of this architecture are not supported"
                )


def _shape_problems(model: nn.Module, target: str, entry: ModuleEntry) -> list[str]:
    weight: Any = getattr(model.get_submodule(target), "weight", None)
    dense = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
    if dense in (entry.shape, entry.dense_shape):
        return []
    return [f"{entry.name} is {list(entry.shape)}, but the model's is {list(dense or ())}"]


def _part_problems(weight: PackedWeight, tensors: Tensors) -> list[str]:
    """What is missing of a weight's tensors in the files, or is not as it says."""
    return [message for _, message in weight.problems(tensors)]


def _has_gaps(model: nn.Module, headers: Tensors, mapper: NameMapper) -> bool:
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
