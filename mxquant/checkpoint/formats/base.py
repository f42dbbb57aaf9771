"""What the on-disk formats of packed weights have in common: :class:`PackedFormat` and what it says of a checkpoint.

A format is one file of this folder and one line in :mod:`mxquant.checkpoint.formats.registry`. Nothing
outside this folder knows what the tensors of a packed weight are called, or how they lie in the files.
This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxquant.checkpoint.formats.packed import GLOBAL_SCALE, PACKED, SCALE, Encoding, PackedWeight, Part
from mxquant.checkpoint.headers import Tensors
from mxquant.errors import CheckpointError
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import QuantScheme

if TYPE_CHECKING:
    import torch

    from mxquant.checkpoint.reader import Checkpoint
    from mxquant.codec.qtensor import QTensor

    Decode = Callable[[QTensor, torch.dtype], torch.Tensor]

# Of layers whose inputs, keys or values are quantized with a scale from calibration; no part of a weight.
ACTIVATION_SCALES = r"\.(input|output|q|k|v)_(global_)?scale(_2)?$"


class UnknownFormatError(CheckpointError):
    """An unsupported quantization: the checkpoint may well be right."""


class PackedFormat(Encoding):
    """One on-disk format of packed weights.

    Attributes
    ----------
    method : ``quant_method`` in the config of its checkpoints.
    suffixes : what follows the dense tensor's name in the name of each part, by role.
    side_file : a file beside ``config.json`` that describes the quantization; None if there is none.
    readers : engines that read its checkpoints without us.
    """

    method: str = "none"
    suffixes: Mapping[str, str] = {PACKED: "", SCALE: "_scale", GLOBAL_SCALE: "_global_scale"}
    side_file: str | None = None
    readers: tuple[str, ...] = ()

    def describe(self, folder: Path) -> dict[str, Any] | None:
        """What :attr:`side_file` says of the quantization; None without it. Raises ``CheckpointError``."""
        return None

    def read(self, config: dict[str, Any], tensors: Tensors, prefix: str = "") -> Layout:
        """The packed weights among ``tensors``, by the ``quantization_config``.

        ``prefix``: of the base model, which names in the files may have or lack where the config has
        it. Raises ``UnknownFormatError`` for an unsupported variant, ``CheckpointError`` for
        a config that cannot be read or tensors that cannot be what their names say.
        """
        raise NotImplementedError

    def weight(
        self, name: str, scheme: QuantScheme, shape: tuple[int, int], *, experts: int | None = None, **more: Any
    ) -> PackedWeight:
        """The packed weight that stands for the dense tensor ``name``, with the parts that the files must hold.

        ``shape``: ``(out, in)`` of one matrix; ``more``: ``transposed`` and ``activations``.
        """
        from mxquant.checkpoint.writer import DTYPE_NAMES
        from mxquant.codec.numerics import scale_dtype

        stack = () if experts is None else (experts,)
        kind = DTYPE_NAMES[scale_dtype(scheme.scale_format)]
        parts = {
            PACKED: self.part(name, PACKED, "U8", (*stack, *scheme.packed_shape(shape))),
            SCALE: self.part(name, SCALE, kind, (*stack, *scheme.scale_shape(shape))),
        }
        if scheme.global_scale:
            one, also = ((1,), ((),)) if experts is None else (stack, ((*stack, 1),))
            parts[GLOBAL_SCALE] = self.part(name, GLOBAL_SCALE, "F32", one, also)
        return PackedWeight(name, scheme, shape, parts, experts, format=self, **more)

    def part(
        self, name: str, role: str, dtype: str, shape: tuple[int, ...], also: tuple[tuple[int, ...], ...] = ()
    ) -> Part:
        return Part(f"{name}{self.suffixes[role]}", dtype, shape, also)

    def open_dense(self, folder: Path, decode: Decode) -> Checkpoint | None:
        """The checkpoint as a dense one to quantize anew, if the model is published in no other form; else None.

        ``decode(q, dtype)`` makes a dense matrix.
        """
        return None

    def why_not_dense(self, config: dict[str, Any]) -> str | None:
        """Why decoded weights are not those of a dense model, if they are not."""
        return None

    def why_not_packed(self, config: dict[str, Any]) -> str | None:
        """Why :func:`mxquant.load` cannot keep the weights packed, if it cannot; transformers then loads them."""
        return f"packed weights of {self.method} are loaded by transformers alone"

    def why_not(self, weight: PackedWeight) -> str | None:
        """Why the format cannot hold a weight, if it cannot."""
        return f"mxquant does not write {self.method}"

    def config_block(
        self,
        weights: Iterable[PackedWeight],
        *,
        names: Iterable[str],
        dense: Iterable[str],
        kv_cache: ActivationScheme | None = None,
    ) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint with ``weights``.

        ``names``: of all tensors, by module where it is a module's weight; ``dense``: entries of the
        list of layers that are not packed.
        """
        raise NotImplementedError


@dataclass
class Layout:
    """The packed weights of a checkpoint.

    Attributes
    ----------
    format : None for a dense checkpoint.
    weights : in file order.
    activation_scales : tensors that only quantized inputs need.
    unlisted : tensors that look packed, or like scales, and belong to no weight.
    unmatched : entries of the config that no tensor matches.
    stale : names that the config keeps dense and the files do not hold; harmless.
    must_be_packed : whether the config says so of a linear layer; None where it lists what is packed.
    must_be_dense : whether the config says so of a module.
    lists : whether the config lists a dense tensor by its name, or a pattern, as one that is packed.
    """

    format: PackedFormat | None
    weights: list[PackedWeight] = field(default_factory=list)
    activation_scales: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    must_be_packed: Callable[[str], bool] | None = None
    must_be_dense: Callable[[str], bool] = lambda module: False
    lists: Callable[[str], bool] = lambda name: False

    @property
    def method(self) -> str | None:
        """``quant_method`` of the config; None for a dense checkpoint."""
        return None if self.format is None else self.format.method

    @property
    def part_names(self) -> set[str]:
        return {part.name for w in self.weights for part in w.parts.values()}

    def packed_strays(self) -> list[str]:
        """A sentence for each packed tensor of :attr:`unlisted`."""
        return [f"{name} is packed, but the quantization config does not list it" for name in self._stray(packed=True)]

    def stray_scales(self) -> list[str]:
        """A sentence for each other tensor of :attr:`unlisted`."""
        return [f"{name} is a part of a packed weight that is not there" for name in self._stray(packed=False)]

    def _stray(self, *, packed: bool) -> list[str]:
        suffix = "" if self.format is None else self.format.suffixes[PACKED]
        return [name for name in self.unlisted if name.endswith((".weight", f".weight{suffix}")) == packed]


def weights_of(
    format: PackedFormat, tensors: Tensors, scheme_of: Callable[[str], QuantScheme | None]
) -> Iterator[PackedWeight]:
    """Weights whose shape is that of their packed tensor, ``[out, in/2]`` or ``[experts, out, in/2]`` of 4-bit codes.

    ``scheme_of``: module name -> scheme; None for a tensor that the config does not list.
    """
    suffix = f".weight{format.suffixes[PACKED]}"
    for info in tensors.values():
        module = info.name.removesuffix(suffix)
        if module == info.name or (suffix == ".weight" and info.dtype != "U8"):
            continue
        scheme = scheme_of(module)
        if scheme is None:
            continue
        if len(info.shape) not in (2, 3):
            raise CheckpointError(f"{info.name} ({info.dtype} {list(info.shape)}) is not a packed matrix")
        *stack, rows, row_bytes = info.shape
        yield format.weight(f"{module}.weight", scheme, (rows, 2 * row_bytes), experts=stack[0] if stack else None)


def named_by_globs(module: str, names: Iterable[str]) -> bool:
    """Whether shell patterns name a module."""
    return any(fnmatch(module, name) for name in names)


def read_side_file(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file beside the config; None if there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: not a description of a quantization ({error!r})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name}: not a description of a quantization (a {type(found).__name__})")
    return found
