"""Keys and values in a block-scaled format: what a quantized KV cache would hold, simulated.

The attention function that a model calls is wrapped, so that it sees every key and value, those of
the cache included, after rounding; blocks lie along the head's features. Rounding again what was
rounded changes nothing that a cache written once would not hold: each token's scales depend on that
token alone, which is why a global scale over tokens is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from mxquant.errors import SchemeError
from mxquant.ops.operators import quantize_activations
from mxquant.schemes.activations import ActivationScheme

# Registered name -> scheme of keys and values.
_REGISTERED: dict[str, ActivationScheme] = {}


def quantize_kv_cache(model: Any, scheme: ActivationScheme) -> None:
    """Have a transformers model quantize its keys and values from now on.

    Raises ``SchemeError`` for models whose attention cannot be exchanged.
    """
    name = _register(scheme)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise SchemeError(
            f"the keys and values of {type(model).__name__} cannot be quantized: it does not take its attention from "
            "transformers' registry; drop the KV cache scheme"
        )


def quantized_kv_cache(model: Any) -> ActivationScheme | None:
    """The scheme of a model's keys and values."""
    return _REGISTERED.get(model.config.get_text_config()._attn_implementation)


def _register(scheme: ActivationScheme) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    name = "mxquant_kv_" + scheme.text.replace("/", "_").replace("+", "_")

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key, value = quantize_activations(key, scheme), quantize_activations(value, scheme)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    _REGISTERED[name] = scheme
    return name
