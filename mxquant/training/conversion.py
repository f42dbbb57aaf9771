"""Putting FP4 layers in the place of a model's linear layers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from mxquant.errors import CheckpointError, SchemeError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.training.linear import FP4Conv1D, FP4Linear
from mxquant.training.noise import Noise
from mxquant.training.recipes import LinearFormats, TrainingRecipe
from mxquant.transformers.architectures import Parameter, inventory
from mxquant.transformers.kinds import Kind
from mxquant.transformers.parts import is_plain_linear
from mxquant.transformers.select import Kept, dense_by_accident


@dataclass(frozen=True)
class Choice:
    """What becomes of one linear layer: its formats, None for high precision, and the reason."""

    name: str
    shape: tuple[int, int]
    formats: LinearFormats | None
    reason: str


def convert(
    model: nn.Module, recipe: TrainingRecipe | str | Path = "fp4-2d", *, seed: int = 0, allow_high: bool = False
) -> nn.Module:
    """Make a model's linear layers train in FP4, in place; returns the model.

    Parameters
    ----------
    model : any Hugging Face causal LM, or another module with ``nn.Linear`` or ``Conv1D`` layers.
        Parameters stay the very same objects, in the dtype they have: the optimizer's master weights.
        Embeddings, norms, and an output head that no rule names stay in high precision.
    recipe : a recipe, the name of one (:mod:`mxquant.training.recipes`) or a YAML or JSON file.
    seed : of the rounding noise; see :func:`noise_of` for resuming.
    allow_high : accept weights that no layer can take to FP4, such as fused experts.

    Raises ``SchemeError`` for rules that match nothing and models of which nothing or too little could be
    converted, ``CheckpointError`` for a model that is quantized already.
    """
    recipe = TrainingRecipe.of(recipe)
    choices = choose(model, recipe, allow_high=allow_high)
    noise = Noise(seed)
    modules = dict(model.named_modules())
    for choice in choices:
        if choice.formats is not None:
            layer: Any = modules[choice.name]
            # The object stays: hooks, ties and other references to it hold.
            layer.__class__ = FP4Conv1D if isinstance(layer, Conv1D) else FP4Linear
            layer.set_up(choice.formats, choice.name, noise)
    if recipe.quantizes:
        model.register_forward_pre_hook(noise.before_forward)
    return model


def choose(model: nn.Module, recipe: TrainingRecipe, *, allow_high: bool = False) -> list[Choice]:
    """What :func:`convert` would make of each linear layer, in order; the errors are its own."""
    _check_dense(model)
    layers = dict(_linear_layers(model))
    if unused := recipe.unused_patterns(layers):
        raise SchemeError(f"recipe {recipe.name}: pattern {unused[0]!r} matches no linear layer of the model")
    parameters = inventory(model) if hasattr(model, "get_output_embeddings") else []
    kinds = {p.module: p.kind for p in parameters if p.name.endswith(".weight")}
    blocks = decoder_blocks(model)
    choices = []
    for name, layer in layers.items():
        decision = recipe.decide(name, _block(name), blocks)
        formats, reason = decision.formats, decision.reason
        kind = kinds.get(name, Kind.LINEAR)
        if not kind.quantized and not decision.named:  # an output head, a router of experts
            formats, reason = None, str(kind)
        shape = tuple(layer.weight.shape)
        choices.append(Choice(name, shape[::-1] if isinstance(layer, Conv1D) else shape, formats, reason))
    if recipe.quantizes:
        _check_coverage(parameters, recipe, choices, allow_high)
    return choices


def decoder_blocks(model: nn.Module) -> int:
    """How many decoder blocks the linear layers of a model are in."""
    return max((b for name, _ in _linear_layers(model) if (b := _block(name)) is not None), default=-1) + 1


def fp4_layers(model: nn.Module) -> dict[str, FP4Linear | FP4Conv1D]:
    """The converted layers of a model, by the name that they had when it was converted."""
    return {m.name: m for m in model.modules() if isinstance(m, FP4Linear | FP4Conv1D)}


def noise_of(model: nn.Module) -> Noise | None:
    """The noise that a converted model's layers share; None for a model without such layers.

    A training loop of one's own saves ``noise_of(model).state_dict()`` with its checkpoints, or calls
    ``noise_of(model).start(steps * accumulation)`` when it resumes. The Trainer callback does the latter.
    """
    return next((layer.noise for layer in fp4_layers(model).values()), None)


@contextlib.contextmanager
def weights_only(model: nn.Module) -> Iterator[None]:
    """While this lasts, forward quantizes the weights alone: the model that a packed checkpoint is."""
    layers = fp4_layers(model).values()
    before = [layer.formats for layer in layers]
    for layer in layers:
        layer.formats = replace(layer.formats, activation_forward=None)
    try:
        yield
    finally:
        for layer, formats in zip(layers, before, strict=True):
            layer.formats = formats


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every plain linear layer."""
    return ((name, module) for name, module in model.named_modules() if is_plain_linear(module))


def _block(name: str) -> int | None:
    """Index of the decoder block that a module is in: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def _check_dense(model: nn.Module) -> None:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or any(isinstance(m, QuantLinear) for m in model.modules()):
        raise CheckpointError(
            "the model is quantized already, and packed weights cannot be trained; start from the dense model, "
            "or make one with `mxquant dequantize`"
        )
    if fp4_layers(model):
        raise CheckpointError("the model's layers have been converted before; load it again for another recipe")


def _check_coverage(
    parameters: list[Parameter], recipe: TrainingRecipe, choices: list[Choice], allow_high: bool
) -> None:
    if all(choice.formats is None for choice in choices):
        raise SchemeError(f"recipe {recipe.name} quantizes nothing of this model: it has {len(choices)} linear layers")
    others = [p for p in parameters if not p.kind.expected and p.kind is not Kind.LINEAR and len(p.shape) >= 2]
    kept = [Kept(p.name, math.prod(p.shape), str(p.kind)) for p in others]
    total = sum(k.size for k in kept) + sum(math.prod(c.shape) for c in choices)
    if not allow_high and dense_by_accident(kept, total):
        raise SchemeError(
            f"{others[0].name} and {len(others) - 1} more weights are no linear layers, so they would train in high "
            "precision; pass allow_high=True (--allow-high) to accept that"
        )
