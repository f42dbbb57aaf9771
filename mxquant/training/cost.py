"""What a recipe would save on hardware with FP4 units: memory by component and a theoretical speed-up.

The counting is that of arXiv 2607.24953, whose two figures for OLMo-1B follow from it: 2353.5 -> 810.0 MB
and a speed-up of 3.56. It is a model, with the assumptions in ``ASSUMPTIONS``; nothing is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from mxquant.schemes.formats import QuantScheme
from mxquant.training.conversion import choose
from mxquant.training.recipes import LinearFormats, TrainingRecipe
from mxquant.transformers.architectures import inventory

ASSUMPTIONS = (
    "memory is that of the weights as the products read them, 2 bytes each where they are not quantized; "
    "block scales are counted apart, as they are not in the paper's figure",
    "the speed-up is that of the linear layers' three products, which take equal time; a product whose operands "
    "both have at most 8 bits runs at 2 times the speed of bf16, with at most 4 bits at 4 times",
    "quantizing, transforms, attention, the output head, norms, the optimizer and communication take no time",
    "training also holds master weights, gradients and AdamW's two moments in fp32: 16 bytes a parameter, "
    "whatever the recipe",
)

_BF16_BYTES = 2
_STATE_BYTES = 16
# Largest number of bits of a product's operands -> its speed, that of bf16 being 1.
_SPEEDS = ((4, 4.0), (8, 2.0))
_PRODUCTS = (
    ("activation_forward", "weight_forward"),
    ("gradient_dgrad", "weight_dgrad"),
    ("gradient_wgrad", "activation_wgrad"),
)


@dataclass
class Component:
    """Weights of one kind and format: parameters, bytes in bf16 and quantized, bytes of block scales."""

    name: str
    parameters: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    scale_bytes: int = 0

    def add(self, shape: tuple[int, ...], scheme: QuantScheme | None) -> None:
        count = math.prod(shape)
        bits = 8 * _BF16_BYTES if scheme is None else scheme.element_format.bits
        self.parameters += count
        self.bytes_before += count * _BF16_BYTES
        self.bytes_after += count * bits // 8
        if scheme is not None:
            rows, columns = scheme.scale_shape((shape[0], shape[1]))
            self.scale_bytes += rows * columns * scheme.scale_format.bits // 8 + 4 * scheme.global_scale


@dataclass(frozen=True)
class Cost:
    """A model's cost under a recipe; see the module's docstring."""

    recipe: str
    components: tuple[Component, ...]
    speedup: float

    @property
    def parameters(self) -> int:
        return sum(c.parameters for c in self.components)

    @property
    def bytes_before(self) -> int:
        return sum(c.bytes_before for c in self.components)

    @property
    def bytes_after(self) -> int:
        return sum(c.bytes_after for c in self.components)

    @property
    def scale_bytes(self) -> int:
        return sum(c.scale_bytes for c in self.components)

    @property
    def saved(self) -> float:
        """Share of the weights' bytes that is gone."""
        return 1 - self.bytes_after / self.bytes_before

    @property
    def state_bytes(self) -> int:
        """Master weights, gradients and optimizer state."""
        return self.parameters * _STATE_BYTES

    def to_dict(self) -> dict[str, Any]:
        totals = ("parameters", "bytes_before", "bytes_after", "scale_bytes", "saved", "state_bytes", "speedup")
        return {
            "recipe": self.recipe,
            **{name: getattr(self, name) for name in totals},
            "components": [vars(c) for c in self.components],
            "assumptions": list(ASSUMPTIONS),
        }


def cost(model: nn.Module, recipe: TrainingRecipe | str, *, allow_high: bool = False) -> Cost:
    """The cost of a Hugging Face model, which may be on the meta device, under a recipe.

    Errors are those of :func:`mxquant.training.convert`.
    """
    recipe = TrainingRecipe.of(recipe)
    choices = {c.name: c for c in choose(model, recipe, allow_high=allow_high)}
    components: dict[str, Component] = {}
    work = time = 0.0
    for parameter in inventory(model):
        if parameter.tied_to is not None:
            continue
        choice = choices.get(parameter.module) if parameter.name.endswith(".weight") else None
        formats = choice.formats if choice else None
        scheme = formats.weight_forward if formats else None
        kind = f"{parameter.kind}, {scheme.element if scheme else 'bf16'}"
        components.setdefault(kind, Component(kind)).add(parameter.shape, scheme)
        if choice is not None and parameter.quantizable:
            size = parameter.shape[0] * parameter.shape[1]
            work += size
            time += size * _relative_time(formats)
    return Cost(recipe.name, tuple(components.values()), work / time if time else 1.0)


def _relative_time(formats: LinearFormats | None) -> float:
    """Time of a layer's three products over that in bf16."""
    return 1.0 if formats is None else sum(1 / _speed(formats, pair) for pair in _PRODUCTS) / len(_PRODUCTS)


def _speed(formats: LinearFormats, operands: tuple[str, str]) -> float:
    schemes = [formats.scheme(operand) for operand in operands]
    bits = max(16 if scheme is None else scheme.element_format.bits for scheme in schemes)
    return next((speed for limit, speed in _SPEEDS if bits <= limit), 1.0)
