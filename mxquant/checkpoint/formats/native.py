"""Our own on-disk format: what ``quantization_config`` in ``config.json`` says, written and read.

::

    {"quant_method": "mxquant", "format_version": 1, "mxquant_version": "0.1.0",
     "schemes": {"fp4-ue5m3-b16": {"element": "fp4_e2m1", ...}},
     "modules": [{"names": ["model.layers.*.self_attn.q_proj"], "scheme": "fp4-ue5m3-b16",
                  "shape": [576, 576], "transposed": false}]}

A module whose inputs are quantized has ``"activations": {"scheme": {...}, "per_token": false}``; keys
and values that are, are described by ``"kv_cache"`` beside ``"modules"``. Either makes it version 2.

Where one tensor holds the matrices of all experts of a mixture, its entry has ``"experts": 128``, its
``names`` are whole tensor names, and ``transposed`` says that the source stores ``[experts, in, out]``.
That makes it version 3.

``names`` are module names of the checkpoint (a tensor's name without ``.weight``); ``*`` stands for
one run of digits. ``shape`` is ``[out_features, in_features]``, also where the source stores the
transpose (``transposed``: GPT-2's Conv1D). Of a module ``m`` the files hold

- ``m.weight``: uint8, the packed elements in the shape of :func:`stored_shape`;
- ``m.weight_scale``: the block scales, ``scheme.scale_shape(shape)``;
- ``m.weight_global_scale``: fp32 ``[1]``, where the scheme has one.

Of a tensor ``t`` of experts they hold ``t``, ``t_scale`` and ``t_global_scale``: the same for each
expert's matrix, stacked; ``[experts]`` global scales.

Everything else in the files is the source's, byte for byte. This module does not import torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mxquant
from mxquant.checkpoint.formats.base import Layout, PackedFormat
from mxquant.checkpoint.formats.packed import PACKED, PackedWeight
from mxquant.checkpoint.headers import Tensors
from mxquant.errors import CheckpointError, SchemeError
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

QUANT_METHOD = "mxquant"
FORMAT_VERSION = 3
_WHERE = "quantization_config in config.json"


@dataclass(frozen=True)
class ModuleEntry:
    """One quantized module: its checkpoint name, scheme and dense shape ``(out, in)``.

    ``transposed``: the source checkpoint stored ``[in, out]``. ``activations``: what the module's
    inputs are quantized to while it runs. ``experts``: how many such matrices the tensor holds; then
    ``name`` is the tensor's. None for the weight of a module.
    """

    name: str
    scheme: QuantScheme
    shape: tuple[int, int]
    transposed: bool = False
    activations: ActivationScheme | None = None
    experts: int | None = None

    @property
    def tensor(self) -> str:
        """The name of the packed tensor; those of its scales follow from it."""
        return self.name if self.experts is not None else f"{self.name}.weight"

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape that the unquantized tensor has in the source checkpoint."""
        return self._stacked(self._dense_matrix)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the packed tensor in the files."""
        return self._stacked(stored_shape(self.scheme, self.shape, self._dense_matrix))

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the packed elements as matrices."""
        return self._stacked(self.scheme.packed_shape(self.shape))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the block scales."""
        return self._stacked(self.scheme.scale_shape(self.shape))

    @property
    def global_scale_shape(self) -> tuple[int, ...]:
        """The shape of the global scales, where the scheme has them."""
        return (1,) if self.experts is None else (self.experts,)

    @property
    def _dense_matrix(self) -> tuple[int, int]:
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.experts is None else (self.experts, *shape)


def entry_of(weight: PackedWeight) -> ModuleEntry:
    """What our config says of a packed weight, and what holds it in a model, whatever files it comes from."""
    name = weight.module if weight.experts is None else weight.name
    return ModuleEntry(name, weight.scheme, weight.shape, weight.transposed, weight.activations, weight.experts)


class NativeFormat(PackedFormat):
    """Our own format, which holds every scheme."""

    method = QUANT_METHOD
    says_rules = True

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        table = parse_config(config)
        layout, found = Layout(self), []
        for name in tensors:
            entry = table.match_tensor(name, prefix)
            if entry is not None:
                found.append(entry.name)
                layout.weights.append(
                    self.weight(
                        name,
                        entry.scheme,
                        entry.shape,
                        experts=entry.experts,
                        transposed=entry.transposed,
                        activations=entry.activations,
                    )
                )
        layout.unmatched = table.unmatched(found)
        layout.lists = lambda name: table.match_tensor(name, prefix) is not None
        return layout

    def weight(
        self, name: str, scheme: QuantScheme, shape: tuple[int, int], *, experts: int | None = None, **more: Any
    ) -> PackedWeight:
        found = super().weight(name, scheme, shape, experts=experts, **more)
        packed = replace(found.parts[PACKED], shape=entry_of(found).stored_shape)
        parts = {role: replace(part, also=()) for role, part in found.parts.items()}
        return replace(found, parts={**parts, PACKED: packed})

    def why_not_packed(self, config: dict[str, Any]) -> str | None:
        parse_config(config)
        return None

    def why_not(self, weight: PackedWeight) -> str | None:
        return None

    def config_block(
        self,
        weights: Iterable[PackedWeight],
        *,
        names: Iterable[str],
        dense: Iterable[str],
        kv_cache: ActivationScheme | None = None,
    ) -> dict[str, Any]:
        return build_config([entry_of(weight) for weight in weights], names, kv_cache)


def stored_shape(scheme: QuantScheme, shape: tuple[int, int], dense_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the packed tensor in the files: ``scheme.packed_shape(shape)``, or that flattened.

    It never equals ``dense_shape``, the one that the source stores, so that a loader that does not
    know the format fails on the size instead of taking codes for weights. 8-bit elements are
    always flattened: theirs would equal it whenever the source is not transposed.
    """
    packed = scheme.packed_shape(shape)
    if scheme.element_format.bits == 8 or packed == tuple(dense_shape):
        return (packed[0] * packed[1],)
    return packed


def build_config(
    entries: Iterable[ModuleEntry], all_names: Iterable[str], kv_cache: ActivationScheme | None = None
) -> dict[str, Any]:
    """The ``quantization_config`` that describes ``entries``, as JSON-serializable objects.

    ``all_names``: the names of all modules in the checkpoint, quantized or not. Names that differ
    in numbers only are written with ``*`` where that matches exactly the modules meant.
    """
    groups: dict[ModuleEntry, list[str]] = defaultdict(list)
    for entry in entries:
        groups[replace(entry, name="")].append(entry.name)
    everything = {*all_names, *(name for names in groups.values() for name in names)}
    config = {
        "quant_method": QUANT_METHOD,
        "format_version": _version(groups, kv_cache),
        "mxquant_version": mxquant.__version__,
        "schemes": {entry.scheme.name: entry.scheme.to_dict() for entry in groups},
        "modules": [
            {
                "names": compact_names(names, everything),
                "scheme": entry.scheme.name,
                "shape": list(entry.shape),
                "transposed": entry.transposed,
                **({"activations": entry.activations.to_dict()} if entry.activations else {}),
                **({"experts": entry.experts} if entry.experts is not None else {}),
            }
            for entry, names in groups.items()
        ],
    }
    return config if kv_cache is None else {**config, "kv_cache": kv_cache.to_dict()}


def _version(entries: Iterable[ModuleEntry], kv_cache: ActivationScheme | None) -> int:
    """The first version whose readers understand all of it: older ones would leave activations as they are."""
    entries = list(entries)
    if any(entry.experts is not None for entry in entries):
        return 3
    return 2 if kv_cache is not None or any(entry.activations for entry in entries) else 1


def compact_names(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Patterns with ``*`` for numbers, as few as possible, that match ``names`` and none of the other
    ``all_names``."""
    alike: dict[str, set[str]] = defaultdict(set)
    for name in all_names:
        alike[with_wildcards(name)].add(name)
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        members[with_wildcards(name)].append(name)
    return [p for pattern, found in members.items() for p in _cover(found, alike[pattern] | set(found), 0)]


def name_regex(pattern: str) -> re.Pattern[str]:
    """The regular expression of a name pattern; to be matched in full."""
    return re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))


class ModuleTable:
    """The quantized modules of a checkpoint, looked up by checkpoint name.

    ``patterns`` are the entries as written, wildcards included; ``kv_cache`` is the scheme of keys
    and values, or None.
    """

    def __init__(self, patterns: Iterable[ModuleEntry], kv_cache: ActivationScheme | None = None):
        self.patterns = list(patterns)
        self.kv_cache = kv_cache
        self._exact = {p.name: p for p in self.patterns if "*" not in p.name}
        self._wild = {p.name: p for p in self.patterns if "*" in p.name}
        self._several = [(name_regex(p.name), p) for p in self._wild.values()]

    def __iter__(self) -> Iterator[ModuleEntry]:
        return iter(self.patterns)

    def __len__(self) -> int:
        return len(self.patterns)

    def match(self, name: str) -> ModuleEntry | None:
        """The entry of the module ``name``, under that name, or None if it is not quantized."""
        found = self._exact.get(name) or self._wild.get(with_wildcards(name))
        if found is None:  # a pattern may keep some numbers and leave others open
            found = next((p for regex, p in self._several if regex.fullmatch(name)), None)
        return found and replace(found, name=name)

    def match_tensor(self, name: str, prefix: str = "") -> ModuleEntry | None:
        """The entry whose packed tensor, in our own format, is called ``name``.

        ``prefix``: of the base model; the name may have or lack it where the entry does not.
        """
        for tensor in [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]:
            for candidate in dict.fromkeys((tensor, tensor.removesuffix(".weight"))):
                entry = self.match(candidate)
                if entry is not None and entry.tensor == tensor:
                    return entry
        return None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns, as written, that match none of ``names``."""
        names = list(names)
        found = self._exact.keys() & set(names)
        joined = "\n".join(names)
        return [
            p.name
            for p in self.patterns
            if p.name not in found
            and not ("*" in p.name and re.search(f"^{name_regex(p.name).pattern}$", joined, re.MULTILINE))
        ]


def parse_config(config: dict[str, Any]) -> ModuleTable:
    """Inverse of :func:`build_config`.

    Raises ``CheckpointError`` for another quantization method, a newer format version, a scheme
    that this version does not know, and entries that are incomplete.
    """
    if config.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"quantization method {config.get('quant_method')!r} is not {QUANT_METHOD}'s own format")
    version = config.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{_WHERE} has no valid format_version (found {version!r})")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{_WHERE} has format version {version}, written by mxquant {config.get('mxquant_version')}; "
            f"mxquant {mxquant.__version__} reads up to {FORMAT_VERSION}: upgrade mxquant"
        )
    try:
        schemes = {key: QuantScheme.from_dict(fields) for key, fields in config["schemes"].items()}
        kv_cache = ActivationScheme.read(config.get("kv_cache"))
        entries = [
            ModuleEntry(
                name,
                schemes[group["scheme"]],
                _matrix_shape(group["shape"]),
                bool(group["transposed"]),
                ActivationScheme.read(group.get("activations")),
                _experts(group.get("experts")),
            )
            for group in config["modules"]
            for name in _names(group["names"])
        ]
        return ModuleTable(entries, kv_cache)
    except SchemeError as error:
        raise CheckpointError(f"{_WHERE} has a number format that this mxquant does not know: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{_WHERE} is malformed: there is no {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{_WHERE} is malformed: {error}") from error


def _matrix_shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"shape {shape!r} is not [out_features, in_features]")
    return shape[0], shape[1]


def _experts(count: Any) -> int | None:
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"experts {count!r} is not a number of experts")
    return count


def _names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names {names!r} is not a list of names")
    return names


def with_wildcards(name: str) -> str:
    """``model.layers.3.mlp.w1`` -> ``model.layers.*.mlp.w1``: whole numbers between dots only."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _cover(members: list[str], others: set[str], position: int) -> list[str]:
    """Patterns for names that agree up to ``position``: one with ``*`` in all numbers after it, or,
    where that would take in too much, the covers of each value of the next number."""
    if len(members) == 1:
        return members
    if set(members) == others:
        parts = members[0].split(".")
        return [".".join(parts[:position] + ["*" if p.isdecimal() else p for p in parts[position:]])]
    parts = members[0].split(".")
    number = next(i for i in range(position, len(parts)) if parts[i].isdecimal())
    values: dict[str, list[str]] = defaultdict(list)
    for name in members:
        values[name.split(".")[number]].append(name)
    return [
        pattern
        for value, names in values.items()
        for pattern in _cover(names, {o for o in others if o.split(".")[number] == value}, number + 1)
    ]


FORMAT = NativeFormat()
