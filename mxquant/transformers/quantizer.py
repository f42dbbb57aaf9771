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
from mxquant.transformers import register
from mxquant.transformers.config import MXQuantConfig
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

    def __init__(self, quantization_config: MXQuantConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.entries: dict[str, ModuleEntry] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on top: gradients pass through the packed layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        module, _, leaf = param_name.rpartition(".")
        return not self.pre_quantized and leaf == "weight" and module in self.entries

    def get_quantize_ops(self) -> Any:
        from mxquant.transformers.onthefly import QuantizeOnLoad

        return QuantizeOnLoad(self.entries, self.quantization_config.seed)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype to cast a tensor of the files to; None leaves it, as packed layers need it."""
        targets = getattr(converter, "target_patterns", ())
        if len(targets) == 1 and self._is_encoding(targets[0]):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module | None = None) -> list[Any]:
        """Renaming rules of the loader, with ours for foreign names last. (5.17 does not pass ``model``.)"""
        if self._packed_name == PACKED:
            return weight_conversions
        from transformers.core_model_loading import WeightRenaming

        return [*weight_conversions, WeightRenaming(self._packed_name, PACKED)]

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, Any]]:
        """Called by ``save_pretrained``: brings the config up to date with the model."""
        self._describe(model)
        return None, {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
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

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        from mxquant.transformers.onthefly import forget_source_precision

        forget_source_precision(model)
        self._check_loaded(model)
        self._restore_dtypes(model)
        if self._packed_name != PACKED:
            # Saving undoes the renamings of loading; what we save has our own names.
            kept = [c for c in model._weight_conversions if c.source_patterns != [self._packed_name]]
            model._weight_conversions = kept
        self._describe(model)
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
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

    def _find_packed(self, model: nn.Module, files: list[str]) -> None:
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

    def _plan_on_the_fly(self, model: nn.Module, files: list[str]) -> None:
        from mxquant.transformers.onthefly import choose_modules, keep_source_precision

        headers = read_headers(files) if files else None
        self.entries = choose_modules(model, self.quantization_config.quant_recipe(), headers)
        replace_modules(model, self.entries)
        keep_source_precision(model, self.entries)

    def _is_encoding(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return module in self.entries and leaf.startswith("weight")

    def _check_loaded(self, model: nn.Module) -> None:
        """Raise ``CheckpointError`` unless every packed layer holds what its scheme says."""
        several = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        for name in self.entries:
            try:
                device = model.get_submodule(name).qweight.device  # checks shapes, dtypes and devices
            except ValueError as error:
                raise CheckpointError(f"{name} was not loaded as it was stored: {error}") from error
            if device.type == "meta" and not several:  # with several devices, it may be offloaded
                raise CheckpointError(f"the weight of {name} was not loaded")

    def _restore_dtypes(self, model: nn.Module) -> None:
        # transformers 5.17 leaves tensors that it renames in the dtype of the file.
        for name, parameter in model.named_parameters():
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.is_floating_point() and parameter.dtype != wanted and parameter.device.type != "meta":
                parameter.data = parameter.data.to(wanted)

    def _is_transposed(self, name: str) -> bool:
        return name in self.entries and self.entries[name].transposed

    def _describe(self, model: nn.Module) -> None:
        """Make the model's config say what the model holds, under the names that saving gives it."""
        rename = _saved_name(model)
        entries = [
            ModuleEntry(rename(n), m.scheme, (m.out_features, m.in_features), self._is_transposed(n))
            for n, m in model.named_modules()
            if isinstance(m, QuantLinear)
        ]
        everything = {rename(key.removesuffix(".weight")) for key in model.state_dict() if key.endswith(".weight")}
        self.quantization_config = MXQuantConfig.from_dict(build_config(entries, everything))
        model.config.quantization_config = self.quantization_config


def _planned_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype that each parameter is to have once loaded."""
    plan = model._get_dtype_plan(model.config.dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), dtype) for glob, dtype in plan.items()]
    return {
        name: next((dtype for pattern, dtype in patterns if pattern.search(name)), parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def _saved_name(model: nn.Module) -> Callable[[str], str]:
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
    with torch.device("meta"):
        if transposed:
            dense = Conv1D(layer.out_features, layer.in_features)
        else:
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    dense.weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().to(dtype))
    return dense.train(layer.training)


# Importing transformers' base class runs the import hook, which found this module half made.
register()
