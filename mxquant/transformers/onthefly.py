"""Quantizing a dense checkpoint while transformers loads it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps

from mxquant.checkpoint.native import ModuleEntry, compact_names, name_regex
from mxquant.errors import SchemeError
from mxquant.formats import QuantScheme
from mxquant.methods.rtn import tensor_amax
from mxquant.ops import quantize
from mxquant.recipe import QuantRecipe
from mxquant.scaling import global_scale_for
from mxquant.transformers.architectures import NameMapper, Parameter, fused_group, inventory, is_plain_linear
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
    chosen: dict[str, ModuleEntry] = {}
    skipped = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not is_plain_linear(m)]
    for p in parameters:
        name = names.get(p.name, p.name).removesuffix(".weight")
        scheme = _scheme_for(p, name, recipe)
        if scheme is None:
            continue
        if p.name not in names:
            skipped.append(p.module)
            continue
        activations = recipe.activations_for(scheme)
        chosen[p.module] = ModuleEntry(name, scheme, (p.shape[0], p.shape[1]), p.transposed, activations)
    unused = recipe.unused_patterns([names.get(p.name, p.name).removesuffix(".weight") for p in parameters])
    if unused:
        raise SchemeError(f"pattern {unused[0]!r} matches no module of {type(model).__name__}")
    if not chosen:
        raise SchemeError(f"nothing of {type(model).__name__} would be quantized: no linear layer is matched")
    if skipped:
        warnings.warn(
            f"{len(skipped)} layers stay dense, because they compute more than a linear map, or because transformers "
            f"assembles their weights from several tensors: {', '.join(skipped[:3])}",
            stacklevel=2,
        )
    return chosen


def _scheme_for(parameter: Parameter, name: str, recipe: QuantRecipe) -> QuantScheme | None:
    decision = recipe.decide(name)
    if not parameter.is_matrix_product or not (parameter.quantizable or decision.named):
        return None
    return decision.scheme


def keep_source_precision(model: Any, entries: Mapping[str, ModuleEntry]) -> None:
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


def shared_global_scales(entries: Mapping[str, ModuleEntry], files: Iterable[str]) -> dict[str, torch.Tensor]:
    """Global scales (fp32 ``[1]``) of the projections that serving engines fuse, by runtime name.

    Each group has one, from the largest magnitude in any of its weights, so all have to be seen
    before the first is quantized: one more pass over the mapped files. Without files, each weight
    gets its own.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for target, entry in entries.items():
        group = fused_group(entry.name) if entry.scheme.global_scale else None
        if group:
            groups[group].append(target)
    wanted = {f"{entries[t].name}.weight": t for members in groups.values() for t in members}
    amax: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for key in wanted.keys() & set(handle.keys()):
                amax[wanted[key]] = tensor_amax(handle.get_tensor(key))
    scales: dict[str, torch.Tensor] = {}
    for members in groups.values():
        found = [amax[t] for t in members if t in amax]
        if found:
            largest = torch.stack(found).amax()
            scales |= {t: global_scale_for(largest, entries[t].scheme) for t in members}
    return scales


class QuantizeOnLoad(ConversionOps):
    """Turns a weight that has just been read into the buffers of its ``QuantLinear``.

    The bytes are those of ``mxquant.quantize(weight, scheme, seed=seed, name=<name in the checkpoint>,
    global_scale=<that of its group>)``, and so those of :func:`mxquant.quantize_model`.
    """

    def __init__(self, entries: Mapping[str, ModuleEntry], seed: int, global_scales: Mapping[str, torch.Tensor]):
        self._entries = entries
        self._seed = seed
        self._global_scales = global_scales

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ((target, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        module = target.removesuffix(".weight")
        entry, shared = self._entries[module], self._global_scales.get(module)
        if entry.transposed:
            weight = weight.t()
        shared = None if shared is None else shared.to(weight.device)
        name = f"{entry.name}.weight"
        q = quantize(weight.contiguous(), entry.scheme, seed=self._seed, name=name, global_scale=shared)
        made = {target: q.packed.view(entry.stored_shape), f"{target}_scale": q.scale}
        if q.global_scale is not None:
            made[f"{target}_global_scale"] = q.global_scale
        return made
