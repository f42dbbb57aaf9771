"""FP4 training: linear layers whose three products see block-scaled numbers.

    model = mxquant.training.convert(model, "fp4-2d")

replaces a model's linear layers in place; parameters, optimizers and ``state_dict`` stay as they are.
Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "RECIPES": "mxquant.training.recipes",
    "LinearFormats": "mxquant.training.recipes",
    "Monitor": "mxquant.training.monitor",
    "Noise": "mxquant.training.noise",
    "TrainingRecipe": "mxquant.training.recipes",
    "convert": "mxquant.training.conversion",
    "noise_of": "mxquant.training.conversion",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from mxquant.training.conversion import convert, noise_of
    from mxquant.training.monitor import Monitor
    from mxquant.training.noise import Noise
    from mxquant.training.recipes import RECIPES, LinearFormats, TrainingRecipe


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mxquant.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
