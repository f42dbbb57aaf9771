"""What each parameter of a transformers model is, and whether it may be quantized.

Decided from the model itself, built on the meta device: the class of each module and the model's
own word on embeddings, output head and tied weights.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mxquant.checkpoint.reader import read_config
from mxquant.errors import CheckpointError
from mxquant.transformers.classes import auto_class
from mxquant.transformers.kinds import Kind
from mxquant.transformers.mixtures import Place, matrices, place_by, routers
from mxquant.transformers.parts import (
    STATE_SPACE_REASON,
    is_plain_linear,
    language_model,
    output_heads,
    state_spaces,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    ``shape``: for a linear weight always ``(out_features, in_features)``, for those of experts
    ``(experts, out_features, in_features)``; ``transposed`` says that the model stores the last two
    the other way round (GPT-2's Conv1D). ``reason``: why it stays dense unless named.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    transposed: bool = False
    tied_to: str | None = None
    reason: str | None = None

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_matrix_product(self) -> bool:
        """Whether the parameter is the weight of ``y = x W^T`` and can be quantized at all."""
        return self.kind.nameable and self.kind is not Kind.EXPERTS and self.tied_to is None

    @property
    def quantizable(self) -> bool:
        """Whether the parameter is a single matrix that is quantized by default."""
        return self.kind is Kind.LINEAR


def build_meta_model(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder, of the class that its config names, without memory for its weights.

    Raises ``CheckpointError`` if transformers does not know the model type or has no such class for it.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    with silent():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # of a broken config, transformers raises whatever its fields lead to
            if not trust_remote_code and read_config(folder).get("auto_map"):
                raise CheckpointError(
                    f"{path}: the model comes with code of its own; pass --trust-remote-code if you trust it"
                ) from error
            raise CheckpointError(f"{path} is not a model known to transformers: {first_line(error)}") from error
        try:
            auto = auto_class(read_config(folder))
            with torch.device("meta"):
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
        except Exception as error:  # as above
            names = ", ".join(map(str, getattr(config, "architectures", None) or [type(config).__name__]))
            raise CheckpointError(
                f"{path}: transformers does not know architecture {names} as a language model: {first_line(error)}"
            ) from error
    _check_class(path, config, type(model).__name__)
    return model.eval()


def _check_class(path: Path, config: Any, built: str) -> None:
    """Raise ``CheckpointError`` if the config names a class of transformers, and another one was built."""
    import transformers

    named = next(iter(getattr(config, "architectures", None) or ()), built)
    cls = getattr(transformers, named, None)
    if named != built and cls is not None and isinstance(config, cls.config_class):
        raise CheckpointError(
            f"{path}: architecture {named} cannot be quantized; language models, classifiers and encoders can, but as "
            f"{built} not all of its weights would be known"
        )


def inventory(model: Any, handled: Collection[str] = ()) -> list[Parameter]:
    """Every parameter of the model, in order, tied ones included.

    ``handled``: those that the model changes or reads as it runs, see :mod:`mxquant.transformers.behaviour`.
    """
    from transformers.pytorch_utils import Conv1D

    is_head = output_heads(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    routing, kept, recurrent, is_text = routers(model), kept_in_fp32(model), state_spaces(model), language_model(model)
    found = []
    for name, tensor in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        module, shape, is_weight, source = modules[path], tuple(tensor.shape), leaf == "weight", tied.get(name)
        inside = is_text(path)
        if is_weight and is_head(module):
            reason = f"output head, tied to {source}" if source else "output head"
            found.append(Parameter(name, Kind.HEAD, shape, tied_to=source, reason=reason))
        elif inside and (transposed := matrices(module).get(leaf)) is not None:
            experts, rows, columns = (shape[0], shape[2], shape[1]) if transposed else shape
            found.append(Parameter(name, Kind.EXPERTS, (experts, rows, columns), transposed, source))
        elif name in handled:
            found.append(Parameter(name, Kind.HANDLED, shape, tied_to=source, reason="handled by the model itself"))
        elif name in recurrent:
            found.append(Parameter(name, Kind.STATE_SPACE, shape, tied_to=source, reason=STATE_SPACE_REASON))
        elif name in routing:
            found.append(Parameter(name, Kind.ROUTER, shape, tied_to=source, reason="router of experts"))
        elif is_weight and is_plain_linear(module):
            transposed = isinstance(module, Conv1D)
            matrix = shape[::-1] if transposed else shape
            kind, why = (Kind.LINEAR, None) if inside else (Kind.OUTSIDE, str(Kind.OUTSIDE_OTHER))
            if kept(name):
                kind, why = Kind.KEPT, "kept in fp32 by the model"
            found.append(Parameter(name, kind, matrix, transposed, source, why))
        else:
            kind = _kind(module, leaf)
            why = f"{kind} of {type(module).__name__}" if kind is Kind.OTHER else str(kind)
            if not inside and kind is Kind.OTHER:
                kind, why = Kind.OUTSIDE_OTHER, str(Kind.OUTSIDE_OTHER)
            found.append(Parameter(name, kind, shape, tied_to=source, reason=why))
    return found


def kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Whether the model's class wants the parameter of a name in fp32, whatever the rest is."""
    plan = model._get_dtype_plan(torch.float16) if hasattr(model, "_get_dtype_plan") else {}
    patterns = [re.compile(glob.replace("*", ".*")) for glob, dtype in plan.items() if dtype == torch.float32]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _kind(module: nn.Module, leaf: str) -> Kind:
    if leaf == "bias" or leaf.endswith("_bias"):
        return Kind.BIAS
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING
    if "norm" in type(module).__name__.lower():
        return Kind.NORM
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Kind.CONVOLUTION
    return Kind.OTHER


class NameMapper:
    """Checkpoint tensor names -> parameter names of the running model.

    Follows the loader of transformers: its renaming rules for the architecture, then the base-model
    prefix added or dropped. ``conversions``: its rules, if others than those of the architecture.
    """

    def __init__(self, model: Any, conversions: Iterable[Any] | None = None):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = (get_model_conversion_mapping(model) or []) if conversions is None else list(conversions)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = getattr(model, "base_model_prefix", "")
        self._known = dict(model.state_dict())
        self._ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def __call__(self, name: str) -> str | None:
        """The parameter that the tensor is, or None: unknown, or one part of a fused parameter."""
        place = self.place(name)
        return place.parameter if place is not None and place.is_whole else None

    def target(self, name: str) -> str | None:
        """The model's tensor that the loader puts the tensor into, whatever it makes of it on the way."""
        target, _ = self._rename(name)
        return target if target in self._known else None

    def conversion(self, name: str) -> tuple[str | None, str | None, Any]:
        """Where the loader collects the tensor: the model's tensor, None if it has none; and the source pattern and
        ``WeightConverter`` that make it, None if it is taken as it is."""
        target, pattern = self._rename(name)
        if target not in self._known:
            return None, None, None
        return target, pattern, self._by_pattern[pattern] if pattern is not None else None

    def place(self, name: str) -> Place | None:
        """Where the tensor goes; None if the model has no place for it."""
        target, pattern = self._rename(name)
        if target not in self._known:
            return None
        if pattern is None:
            return Place(target)
        return place_by(self._by_pattern[pattern], pattern, target, self._renamed(name))

    def ignores(self, name: str) -> bool:
        """Whether the model's class says that files may hold the tensor and that nobody needs it."""
        return any(re.search(pattern, name) for pattern in self._ignored)

    def missing(self, names: Iterable[str], parameters: Iterable[Parameter]) -> Iterator[str]:
        """Parameters that no tensor of the checkpoint fills, nor any that they are tied to.

        The loader ties in both directions: of a group of tied parameters, whichever the files hold fills them all.
        """
        present: set[str] = set()
        for name in names:
            target, pattern = self._rename(name)
            present.add(target)
            if pattern is not None:
                first, *others = self._by_pattern[pattern].target_patterns
                present |= {target.replace(first, other) for other in others}
        parameters = list(parameters)
        filled = {p.tied_to or p.name for p in parameters if p.name in present}
        yield from (p.name for p in parameters if p.tied_to is None and p.name not in filled)

    def _rename(self, name: str) -> tuple[str, str | None]:
        """Target parameter, and the source pattern if a fusing or splitting conversion makes it."""
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if renamed in self._known:
            return renamed, pattern
        return rename_source_key(name, [], [], self._prefix, self._known)[0], None

    def _renamed(self, name: str) -> str:
        """The name that converters look at."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self._renamings, [])[0]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without warnings of weights that are not made and of a config that the caller looks at himself."""
    from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

    before = get_verbosity()
    set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_verbosity(before)


def first_line(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" Model type should be one of")[0]
    return text[:300] or type(error).__name__
