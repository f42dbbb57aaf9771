"""Quantizing a dense checkpoint while transformers loads it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from mxquant.checkpoint.native import ModuleEntry, compact_names, name_regex
from mxquant.errors import SchemeError
from mxquant.formats import QuantScheme
from mxquant.ops import quantize
from mxquant.recipe import QuantRecipe
from mxquant.transformers.architectures import NameMapper, Parameter, inventory
from mxquant.transformers.matching import Headers


def choose_modules(model: nn.Module, recipe: QuantRecipe, headers: Headers | None) -> dict[str, ModuleEntry]:
    """Modules to quantize: runtime name -> entry under the name of the checkpoint.

    ``headers``: those of the checkpoint; None if it is not safetensors, so that its names are taken
    to be the model's. Output heads and tied weights stay dense unless a rule names them, as in
    :func:`mxquant.quantize_model`. Raises ``SchemeError`` for patterns that match nothing and if
    nothing would be quantized.
    """
    parameters = [p for p in inventory(model) if p.name.endswith(".weight")]
    names = {p.name: p.name for p in parameters}
    if headers is not None:
        mapper = NameMapper(model)
        names = {target: key for key in headers if (target := mapper(key)) is not None}
    chosen, assembled = {}, []
    for p in parameters:
        name = names.get(p.name, p.name).removesuffix(".weight")
        scheme = _scheme_for(p, name, recipe)
        if scheme is None:
            continue
        if p.name not in names:
            assembled.append(p.module)
            continue
        chosen[p.module] = ModuleEntry(name, scheme, (p.shape[0], p.shape[1]), p.transposed)
    unused = recipe.unused_patterns([names.get(p.name, p.name).removesuffix(".weight") for p in parameters])
    if unused:
        raise SchemeError(f"pattern {unused[0]!r} matches no module of {type(model).__name__}")
    if not chosen:
        raise SchemeError(f"nothing of {type(model).__name__} would be quantized: no linear layer is matched")
    if assembled:
        warnings.warn(
            f"{len(assembled)} layers stay dense, because transformers assembles their weights from several tensors "
            f"(or the checkpoint lacks them): {', '.join(assembled[:3])}",
            stacklevel=2,
        )
    return chosen


def _scheme_for(parameter: Parameter, name: str, recipe: QuantRecipe) -> QuantScheme | None:
    decision = recipe.decide(name)
    if not parameter.is_matrix_product or not (parameter.quantizable or decision.named):
        return None
    return decision.scheme


def keep_source_precision(model: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Have the loader hand over the weights to be quantized in fp32, whatever the model's dtype.

    bf16 and fp16 sources lose nothing by it, and fp32 ones are not rounded twice; and loaders that
    would cast a weight to the dtype of its place, by now uint8, do not.
    """
    # A few patterns are searched faster than thousands of names.
    compact = compact_names(entries, [name for name, _ in model.named_modules()])
    patterns = [f"^{name_regex(name).pattern}\\.weight$" for name in compact]
    plan = model._get_dtype_plan

    def with_weights(dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**dict.fromkeys(patterns, torch.float32), **plan(dtype)}

    model._get_dtype_plan = with_weights


def forget_source_precision(model: nn.Module) -> None:
    """Undo :func:`keep_source_precision`."""
    model.__dict__.pop("_get_dtype_plan", None)


class QuantizeOnLoad(ConversionOps):
    """Turns a weight that has just been read into the buffers of its ``QuantLinear``.

    The bytes are those of ``mxquant.quantize(weight, scheme, seed=seed, name=<name in the checkpoint>)``.
    """

    def __init__(self, entries: Mapping[str, ModuleEntry], seed: int):
        self._entries = entries
        self._seed = seed

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        ((target, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        entry = self._entries[target.removesuffix(".weight")]
        if entry.transposed:
            weight = weight.t()
        q = quantize(weight.contiguous(), entry.scheme, seed=self._seed, name=f"{entry.name}.weight")
        made = {target: q.packed.view(entry.stored_shape), f"{target}_scale": q.scale}
        if q.global_scale is not None:
            made[f"{target}_global_scale"] = q.global_scale
        return made
