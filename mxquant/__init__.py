"""4-bit block-scaled quantization for Hugging Face language models.

Public names are loaded on first use, so that ``import mxquant`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ActivationScheme": "mxquant.schemes.activations",
    "MXQuantConfig": "mxquant.transformers.config",
    "MXQuantError": "mxquant.errors",
    "QTensor": "mxquant.codec.qtensor",
    "QuantLinear": "mxquant.nn.quant_linear",
    "QuantRecipe": "mxquant.schemes.recipe",
    "QuantScheme": "mxquant.schemes.formats",
    "dequantize": "mxquant.ops.operators",
    "dequantize_model": "mxquant.convert.dequantize",
    "linear": "mxquant.ops.operators",
    "load": "mxquant.transformers.loading",
    "quantize": "mxquant.ops.operators",
    "quantize_model": "mxquant.convert.pipeline",
}

# Submodules that `import mxquant` makes available, e.g. `mxquant.theory.mse`.
_SUBMODULES = ("theory", "training")

__all__ = ["__version__", *_EXPORTS, *_SUBMODULES]

if TYPE_CHECKING:
    from mxquant import theory, training
    from mxquant.codec.qtensor import QTensor
    from mxquant.convert.dequantize import dequantize_model
    from mxquant.convert.pipeline import quantize_model
    from mxquant.errors import MXQuantError
    from mxquant.nn.quant_linear import QuantLinear
    from mxquant.ops.operators import dequantize, linear, quantize
    from mxquant.schemes.activations import ActivationScheme
    from mxquant.schemes.formats import QuantScheme
    from mxquant.schemes.recipe import QuantRecipe
    from mxquant.transformers.config import MXQuantConfig
    from mxquant.transformers.loading import load


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"mxquant.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mxquant' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
