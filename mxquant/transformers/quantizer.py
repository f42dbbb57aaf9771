"""``MXQuantHfQuantizer``: what transformers calls while it loads, saves and dequantizes our models."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

from mxquant.checkpoint.native import ModuleEntry, build_config
from mxquant.errors import CheckpointError, MXQuantError
from mxquant.modules import QuantLinear
from mxquant.numerics import scale_dtype
from mxquant.transformers import register
from mxquant.transformers.config import MXQuantConfig
from mxquant.transformers.kv_cache import quantize_kv_cache, quantized_kv_cache
from mxquant.transformers.matching import (
    COMPRESSED_TENSORS_PACKED,
    PACKED,
    check_companions,
    find_packed,
    read_headers,
    replace_modules,
    table_of_compressed_tensors,
)

# Tensors of compressed-tensors checkpoints that only quantized activations need.
_ACTIVATION_SCALES = r"\.(input|output|q|k|v)_(global_)?scale$"


class MXQuantHfQuantizer(HfQuantizer):
    """Replaces linear layers by :class:`mxquant.QuantLinear` before the weights are loaded.

    A quantized checkpoint is checked against its headers first, a dense one is quantized tensor by
    tensor as it is read. After loading, the model's config describes what it holds, so that
    ``save_pretrained`` writes a checkpoint in our own format.

    Parameters of transformers' base class; ``entries`` maps the names of the replaced modules to
    what the checkpoint says of them.
    """

    requires_calibration = False
    quantization_config: MXQuantConfig

    def __init__(self, quantization_config: MXQuantConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.entries: dict[str, ModuleEntry] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._global_scales: dict[str, torch.Tensor] = {}

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
        module, _, leaf = param_name.rpartition(".")
        return not self.pre_quantized and leaf == "weight" and module in self.entries

    def get_quantize_ops(self) -> Any:
        from mxquant.transformers.onthefly import QuantizeOnLoad

        return QuantizeOnLoad(self.entries, self.quantization_config.seed, self._global_scales)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Renaming rules of the loader, with ours for foreign names last. (5.17 does not pass ``model``.)"""
        if self._packed_name == PACKED:
            return weight_conversions
        from transformers.core_model_loading import WeightRenaming

        return [*weight_conversions, WeightRenaming(self._packed_name, PACKED)]

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
        files = [str(f) for f in checkpoint_files or () if str(f).endswith(".safetensors")]
        if self.pre_quantized:
            self._find_packed(model, files)
        else:
            self._plan_on_the_fly(model, files)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from mxquant.transformers.onthefly import forget_source_precision

        forget_source_precision(model)
        self._restore_dtypes(model)
        self._check_loaded(model)
        kv_cache = self.quantization_config.kv_cache_scheme
        if kv_cache is not None:
            quantize_kv_cache(model, kv_cache)
        if self._packed_name != PACKED:
            # Saving undoes the renamings of loading; what we save has our own names.
            kept = [c for c in model._weight_conversions if c.source_patterns != [self._packed_name]]
            model._weight_conversions = kept
        self._describe(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantLinear):
                model.set_submodule(name, _dense(module, dtype, self._is_transposed(name)))
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._is_quantized = False
        return model.to(dtype) if model.dtype != dtype else model

    @property
    def _packed_name(self) -> str:
        foreign = self.quantization_config.compressed_tensors is not None
        return COMPRESSED_TENSORS_PACKED if foreign else PACKED

    def _find_packed(self, model: Any, files: list[str]) -> None:
        if not files:
            raise CheckpointError("packed weights are loaded from safetensors files only, not from a state dict")
        headers = read_headers(files)
        if self.quantization_config.compressed_tensors is None:
            table = self.quantization_config.table()
        else:
            table = table_of_compressed_tensors(headers)
            ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _ACTIVATION_SCALES}
            model._keys_to_ignore_on_load_unexpected = ignored
        self.entries = find_packed(model, headers, table, self._packed_name)
        replace_modules(model, self.entries)
        check_companions(model, self.entries)

    def _plan_on_the_fly(self, model: Any, files: list[str]) -> None:
        from mxquant.transformers.onthefly import choose_modules, keep_source_precision, shared_global_scales

        headers = read_headers(files) if files else None
        self.entries = choose_modules(model, self.quantization_config.quant_recipe(), headers)
        self._global_scales = shared_global_scales(self.entries, files)
        replace_modules(model, self.entries)
        keep_source_precision(model, self.entries)

    def _check_loaded(self, model: Any) -> None:
        """Raise ``CheckpointError`` unless every packed layer holds what its scheme says."""
        several = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        for name in self.entries:
            try:
                device = model.get_submodule(name).qweight.device  # checks shapes, dtypes and devices
            except ValueError as error:
                raise CheckpointError(f"{name} was not loaded as it was stored: {error}") from error
            if device.type == "meta" and not several:  # with several devices, it may be offloaded
                raise CheckpointError(f"the weight of {name} was not loaded")

    def _restore_dtypes(self, model: Any) -> None:
        # The loader widens float scales to fp32 where the model wants a layer so; narrowing them is exact.
        for name in self.entries:
            layer = model.get_submodule(name)
            if layer.weight_scale.is_floating_point():
                layer.weight_scale = layer.weight_scale.to(scale_dtype(layer.scheme.scale_format))
        # transformers 5.17 leaves tensors that it renames in the dtype of the file.
        for name, parameter in model.named_parameters():
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.is_floating_point() and parameter.dtype != wanted and parameter.device.type != "meta":
                parameter.data = parameter.data.to(wanted)

    def _is_transposed(self, name: str) -> bool:
        return name in self.entries and self.entries[name].transposed

    def _describe(self, model: Any) -> None:
        """Make the model's config say what the model holds, under the names that saving gives it."""
        rename = _saved_name(model)
        entries = [
            ModuleEntry(rename(n), m.scheme, (m.out_features, m.in_features), self._is_transposed(n), m.activations)
            for n, m in model.named_modules()
            if isinstance(m, QuantLinear)
        ]
        everything = {rename(key.removesuffix(".weight")) for key in model.state_dict() if key.endswith(".weight")}
        kv_cache = quantized_kv_cache(model)
        self.quantization_config = MXQuantConfig.from_dict(build_config(entries, everything, kv_cache))
        model.config.quantization_config = self.quantization_config


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
