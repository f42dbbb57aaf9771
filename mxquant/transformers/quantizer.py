"""``MXQuantHfQuantizer``: what transformers calls while it loads, saves and dequantizes our models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.base import HfQuantizer

from mxquant.checkpoint.formats import native, registry
from mxquant.checkpoint.formats.base import ACTIVATION_SCALES, PackedFormat
from mxquant.checkpoint.formats.native import ModuleEntry, build_config
from mxquant.codec.numerics import scale_dtype
from mxquant.codec.qtensor import QTensor
from mxquant.errors import CheckpointError, MXQuantError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.transformers import register
from mxquant.transformers.architectures import NameMapper
from mxquant.transformers.config import MXQuantConfig
from mxquant.transformers.conversions import for_packed, from_files
from mxquant.transformers.experts import QuantExperts, unpack_experts
from mxquant.transformers.kv_cache import quantize_kv_cache, quantized_kv_cache
from mxquant.transformers.matching import (
    Packed,
    check_companions,
    find_packed,
    read_headers,
    replace_experts,
    replace_modules,
)
from mxquant.transformers.tied import put_back, repeated, set_aside


class MXQuantHfQuantizer(HfQuantizer):
    """Replaces linear layers by :class:`mxquant.QuantLinear`, and packs experts, before the weights are loaded.

    A quantized checkpoint is checked against its headers first, a dense one is quantized tensor by
    tensor as it is read. After loading, the model's config describes what it holds, so that
    ``save_pretrained`` writes a checkpoint in our own format.

    Parameters of transformers' base class; ``packed`` is what is replaced, and what the checkpoint
    says of it.
    """

    requires_calibration = False
    quantization_config: MXQuantConfig

    def __init__(self, quantization_config: MXQuantConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.packed = Packed()
        self._dtypes: dict[str, torch.dtype] = {}
        self._global_scales: dict[str, torch.Tensor] = {}
        self._copies: dict[str, str] = {}
        self._device_map: dict[str, Any] = {}

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on top: gradients pass through the packed layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.pre_quantized:
            return False
        module, _, leaf = param_name.rpartition(".")
        if leaf == "weight" and module in self.packed.modules:
            return True
        return param_name in self.packed.experts

    def get_quantize_ops(self) -> Any:
        from mxquant.transformers.onthefly import QuantizeOnLoad

        return QuantizeOnLoad(self.packed, self.quantization_config.seed, self._global_scales)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The loader's rules, made for packed experts and, last, foreign names. (5.17 does not pass ``model``.)"""
        if self.packed.experts and not self.pre_quantized:
            from mxquant.transformers.onthefly import for_quantizing

            return for_quantizing(weight_conversions, self.packed.experts, self.quantization_config.seed)
        if self.packed.experts or self.packed.modules:
            weight_conversions = for_packed(weight_conversions, self.packed.experts, self.packed.tensors)
        return [*weight_conversions, *from_files(self._format)]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, Any]]:
        """Called by ``save_pretrained``: brings the config up to date with the model."""
        self._describe(model)
        return None, {}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        distributed = getattr(model.config, "distributed_config", None)
        if (getattr(distributed, "tp_size", None) or 1) > 1:
            raise MXQuantError("packed weights cannot be sharded by tensor parallelism yet; use device_map instead")
        self._dtypes = _planned_dtypes(model)
        given = kwargs.get("device_map")
        self._device_map = given if isinstance(given, dict) else {}
        files = [str(f) for f in checkpoint_files or ()]
        if self.pre_quantized:
            self._find_packed(model, [f for f in files if f.endswith(".safetensors")])
        else:
            self._plan_on_the_fly(model, [f for f in files if f.endswith((".safetensors", ".bin"))])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from mxquant.transformers.onthefly import forget_source_precision, rules_of

        forget_source_precision(model)
        if self.packed.experts and not self.pre_quantized:
            # Saving undoes the conversions of loading; what is saved is packed.
            used = rules_of(model._weight_conversions)
            model._weight_conversions = for_packed(used, self.packed.experts, self.packed.tensors)
        self._restore_dtypes(model)
        self._check_loaded(model)
        put_back(model, self._copies)
        kv_cache = self.quantization_config.kv_cache_scheme
        if kv_cache is not None:
            quantize_kv_cache(model, kv_cache)
        # Saving undoes the renamings of loading; what we save has our own names.
        foreign = [c.source_patterns for c in from_files(self._format)]
        model._weight_conversions = [c for c in model._weight_conversions if c.source_patterns not in foreign]
        self._describe(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear | QuantExperts) and any(b.is_meta for b in module.buffers(recurse=False)):
                raise MXQuantError(f"{name} is offloaded; load the model without offload_buffers to make it dense")
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantLinear):
                model.set_submodule(name, _dense(module, dtype, self._is_transposed(name)))
            elif isinstance(module, QuantExperts):
                unpack_experts(module, dtype)
        put_back(model, self._copies)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._is_quantized = False
        return model.to(dtype) if model.dtype != dtype else model

    @property
    def _format(self) -> PackedFormat:
        """The on-disk format of the files."""
        foreign = self.quantization_config.foreign
        return native.FORMAT if foreign is None else registry.get(foreign.get("quant_method"))

    def _find_packed(self, model: Any, files: list[str]) -> None:
        if not files:
            raise CheckpointError("packed weights are loaded from safetensors files only, not from a state dict")
        headers = read_headers(files)
        config = self.quantization_config.foreign
        if config is None:
            config = self.quantization_config.to_dict()
        else:
            ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), ACTIVATION_SCALES}
            model._keys_to_ignore_on_load_unexpected = ignored
        self.packed = find_packed(model, headers, config)
        self._set_copies_aside(model, headers)
        replace_modules(model, self.packed.modules)
        replace_experts(model, self.packed.experts)
        rules = self.update_weight_conversions(get_model_conversion_mapping(model) or [], model)
        check_companions(model, self.packed, rules)

    def _plan_on_the_fly(self, model: Any, files: list[str]) -> None:
        from mxquant.transformers.onthefly import choose, keep_source_precision, shared_global_scales

        headers = read_headers(files) if files else None
        self.packed = choose(model, self.quantization_config.quant_recipe(), headers)
        self._global_scales = shared_global_scales(self.packed.modules, files)
        self._set_copies_aside(model, headers or ())
        replace_modules(model, self.packed.modules)
        replace_experts(model, self.packed.experts)
        keep_source_precision(model, self.packed)

    def _set_copies_aside(self, model: Any, headers: Iterable[str]) -> None:
        mapper = NameMapper(model)
        self._copies = repeated(model, self.packed.modules, {mapper.target(key) for key in headers})
        set_aside(model, self.packed.modules, self._copies)

    def _check_loaded(self, model: Any) -> None:
        """Raise ``CheckpointError`` unless every packed layer holds what its scheme says."""
        places = {str(place) for place in (self._device_map or getattr(model, "hf_device_map", None) or {}).values()}
        elsewhere = "disk" in places or "meta" in places or len(places) > 1
        for name in (*self.packed.modules, *self.packed.experts):
            try:
                weights = _weights(model, name)  # checks shapes, dtypes and devices
            except ValueError as error:
                raise CheckpointError(f"{name} was not loaded as it was stored: {error}") from error
            if weights[0].device.type != "meta":
                _check_global_scales(name, weights)
            elif not elsewhere:
                raise CheckpointError(f"the weight of {name} was not loaded")

    def _restore_dtypes(self, model: Any) -> None:
        # The loader widens float scales to fp32 where the model wants a layer so; narrowing them is exact.
        for name in {*self.packed.tensors.values()}:
            module, _, leaf = f"{name}_scale".rpartition(".")
            buffers = model.get_submodule(module)._buffers
            if buffers[leaf].is_floating_point():
                buffers[leaf] = buffers[leaf].to(scale_dtype(self.packed.scheme_of(name).scale_format))
        # transformers 5.17 leaves tensors that it renames in the dtype of the file.
        for name, parameter in model.named_parameters():
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.is_floating_point() and parameter.dtype != wanted and parameter.device.type != "meta":
                parameter.data = parameter.data.to(wanted)

    def _is_transposed(self, name: str) -> bool:
        return name in self.packed.modules and self.packed.modules[name].transposed

    def _describe(self, model: Any) -> None:
        """Make the model's config say what the model holds, under the names that saving gives it."""
        rename = _saved_name(model)
        entries = [
            ModuleEntry(rename(n), m.scheme, (m.out_features, m.in_features), self._is_transposed(n), m.activations)
            for n, m in model.named_modules()
            if isinstance(m, QuantLinear)
        ]
        entries += self._experts_entries(model)
        everything = {rename(key.removesuffix(".weight")) for key in model.state_dict() if key.endswith(".weight")}
        kv_cache = quantized_kv_cache(model)
        self.quantization_config = MXQuantConfig.from_dict(build_config(entries, everything, kv_cache))
        model.config.quantization_config = self.quantization_config

    def _experts_entries(self, model: Any) -> list[ModuleEntry]:
        """Entries for packed experts, under the names that saving gives their tensors."""
        found = []
        for path, module in model.named_modules():
            for name, entry in module.entries.items() if isinstance(module, QuantExperts) else ():
                tensor = torch.empty(entry.stored_shape, dtype=torch.uint8, device="meta")
                saved = list(revert_weight_conversion(model, {f"{path}.{name}" if path else name: tensor}))
                found += _saved_entries(entry, saved)
        return found


def _saved_entries(entry: ModuleEntry, names: list[str]) -> list[ModuleEntry]:
    """What each of the tensors holds that a packed parameter of experts is saved as."""
    assert entry.experts is not None
    rows, columns = entry.shape
    if len(names) < entry.experts or (entry.experts == 1 and not names[0].endswith(".weight")):
        shape = (rows // len(names), columns)
        return [replace(entry, name=name, shape=shape) for name in names]
    shape = (rows * entry.experts // len(names), columns)
    return [replace(entry, name=n.removesuffix(".weight"), shape=shape, experts=None) for n in names]


def _weights(model: Any, name: str) -> list[QTensor]:
    """A packed module or parameter of experts. Raises ``ValueError`` if its parts do not fit each other."""
    module, _, leaf = name.rpartition(".")
    parent = model.get_submodule(module)
    return parent.qtensors(leaf) if isinstance(parent, QuantExperts) else [model.get_submodule(name).qweight]


def _check_global_scales(name: str, weights: list[QTensor]) -> None:
    found = [weight.global_scale for weight in weights if weight.global_scale is not None]
    bad = [float(scale) for scale in found if not 0 < float(scale) < math.inf]
    if bad:
        raise CheckpointError(f"the global scale of {name} is {bad[0]}, not a positive number; the files are damaged")


def _planned_dtypes(model: Any) -> dict[str, torch.dtype]:
    """The dtype that each parameter is to have once loaded."""
    plan = model._get_dtype_plan(model.config.dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), dtype) for glob, dtype in plan.items()]
    return {
        name: next((dtype for pattern, dtype in patterns if pattern.search(name)), parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def _saved_name(model: Any) -> Callable[[str], str]:
    """Maps a runtime module name to the one that ``save_pretrained`` writes."""
    from transformers.core_model_loading import WeightRenaming

    loaded = [c for c in getattr(model, "_weight_conversions", None) or () if isinstance(c, WeightRenaming)]
    renamings = [c.reverse_transform() for c in reversed(loaded)]

    def rename(module: str) -> str:
        key = f"{module}.weight"
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key.removesuffix(".weight")

    return rename


def _dense(layer: QuantLinear, dtype: torch.dtype, transposed: bool) -> nn.Module:
    """The dense layer that a packed one stands for: ``nn.Linear``, or GPT-2's ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    weight = layer.dequantize(dtype)
    dense: nn.Module
    with torch.device("meta"):
        if transposed:
            dense = Conv1D(layer.out_features, layer.in_features)
        else:
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    dense.weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
    if isinstance(layer.bias, torch.Tensor):
        dense.bias = nn.Parameter(layer.bias.detach().to(dtype))
    return dense.train(layer.training)


# Importing transformers' base class runs the import hook, which found this module half made.
register()
