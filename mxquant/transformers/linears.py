"""Which modules of a model the loaders of packed checkpoints take for linear layers.

Their configs name the layers that stay dense; every other linear layer is expected to be packed. Loaders make a
packed layer of it before they read any file, so a dense weight finds no place and is dropped.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def loader_linears(model: Any) -> list[str]:
    """Names of the modules that a loader replaces unless the config names them, in the model's order.

    Every instance of ``nn.Linear``, subclasses, tied layers and output heads included, a shared module once: what
    ``match_named_modules`` and ``apply_quantization_config`` of compressed-tensors 0.20.1 do with the target
    ``Linear``, ModelOpt and Quark with every linear layer.
    """
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
