"""LoRA adapters of PEFT on packed layers: ``y = x W^T + s x A^T B^T``; A and B are trained, ``W`` stays packed.

PEFT asks a chain of functions which of its layers fits a layer of the model, and has no place for
others to join in. :func:`install` therefore puts one for packed layers before the last of the chain,
when PEFT has been imported (``mxquant/_autoload.py``). PEFT 0.19 and newer pass what is needed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from peft.tuners import tuners_utils
from peft.tuners.lora import layer, model
from torch import nn

from mxquant.errors import AdapterError
from mxquant.nn.quant_linear import QuantLinear

# Ways to begin that look at nothing but the adapter's own matrices.
_INITS = (True, False, "gaussian", "eva")


def install() -> None:
    """Teach PEFT about packed layers. Calling it again changes nothing."""
    if hasattr(model.dispatch_default, "__wrapped__") or "config" not in _arguments(model.dispatch_default):
        return
    tuner: Any = model.LoraModel
    model.dispatch_default = _dispatch(model.dispatch_default)
    tuner._check_merge_allowed = _check_merge(tuner._check_merge_allowed)
    tuners_utils._maybe_include_all_linear_layers = _include_packed(tuners_utils._maybe_include_all_linear_layers)


class LoraQuantLinear(layer.Linear):
    """A packed layer and its adapters. Raises ``AdapterError`` for kinds of LoRA that need its dense weight."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        if config.init_lora_weights not in _INITS:
            raise AdapterError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the layer's dense weight, and "
                f"{kwargs.get('target_name') or 'the layer'} is packed; leave it True"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def resolve_lora_variant(self, *args: Any, **kwargs: Any) -> None:
        variant = super().resolve_lora_variant(*args, **kwargs)
        if variant is not None:
            kind = type(variant).__name__.removesuffix("LinearVariant")
            raise AdapterError(f"{kind} looks at the layer's dense weight, and packed layers have none; use plain LoRA")

    def merge(self, *args: Any, **kwargs: Any) -> None:
        raise AdapterError(_MERGE)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features


_MERGE = (
    "adapters cannot be merged into packed weights; merge it into the dense model instead, PeftModel."
    "from_pretrained(mxquant.load(path).dequantize(), adapter).merge_and_unload(), and quantize what that saves"
)


def _dispatch(default: Any) -> Any:
    @functools.wraps(default)
    def dispatch(target: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> nn.Module | None:
        base = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
        layer_class = LoraQuantLinear if isinstance(base, QuantLinear) else default
        return layer_class(target, adapter_name, *args, **kwargs)

    return dispatch


def _check_merge(allowed: Any) -> Any:
    """Refuse before the first layer is merged, so that none is."""

    @functools.wraps(allowed)
    def check(self: Any) -> None:
        if any(isinstance(module, LoraQuantLinear) for module in self.model.modules()):
            raise AdapterError(_MERGE)
        allowed(self)

    return check


def _include_packed(original: Any) -> Any:
    """``target_modules="all-linear"`` is of the packed layers, too."""

    @functools.wraps(original)
    def include(config: Any, base: Any) -> Any:
        wanted = getattr(config, "target_modules", None)
        everything = isinstance(wanted, str) and wanted.lower() == tuners_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND
        config = original(config, base)
        if everything:
            head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
            packed = {n for n, m in base.named_modules() if isinstance(m, QuantLinear) and m is not head}
            config.target_modules |= {n for n in packed if not n.endswith(".base_layer")}
        return config

    return include


def _arguments(function: Any) -> Any:
    return inspect.signature(function).parameters
