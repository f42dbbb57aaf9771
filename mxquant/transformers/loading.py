"""``mxquant.load``: the explicit way from a checkpoint to a model whose weights stay packed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.native import QUANT_METHOD
from mxquant.checkpoint.reader import read_config, resolve_source
from mxquant.errors import CheckpointError
from mxquant.transformers import register
from mxquant.transformers.classes import auto_class

# Arguments of from_pretrained that say where the files are, rather than what to do with them.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """A causal LM of transformers, with quantized weights kept packed where this library can read them.

    Parameters
    ----------
    path : a model folder or a hub id. Our own format and compressed-tensors' NVFP4 and MXFP4 stay
        packed; dense checkpoints and other quantizations load as they do in transformers.
    dtype : dtype of activations and of everything that is not quantized; the config's by default.
    device_map, kwargs : passed to ``from_pretrained`` of ``AutoModelForCausalLM``, or of the class that
        knows the multimodal model.

    Raises ``CheckpointError``, in one line, for a folder that is missing or is not a model, a format
    that is newer than this version, and weights that do not fit their description.
    """
    from transformers import AutoConfig

    register()
    path = Path(path).expanduser() if Path(path).expanduser().is_dir() else path
    where = {key: kwargs[key] for key in _WHERE if key in kwargs}
    described = _model_config(path, where)
    found = registry.quantization_in(described)
    if found is not None and _stays_packed(found) and found["quant_method"] != QUANT_METHOD:
        _warn_of_activations(path, found)
        extra = {key: kwargs[key] for key in ("trust_remote_code", "code_revision") if key in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(path, **where, **extra)
        config.quantization_config = {"quant_method": QUANT_METHOD, "foreign": found}
        kwargs["config"] = config
    if dtype is not None:
        kwargs["dtype"] = dtype
    with_info, may_differ = (kwargs.pop(key, False) for key in ("output_loading_info", "ignore_mismatched_sizes"))
    model, info = auto_class(described).from_pretrained(
        path, device_map=device_map, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
    )
    _check_loaded(path, info, found is not None, may_differ)
    return (model, info) if with_info else model


def _check_loaded(path: str | Path, info: dict[str, Any], packed: bool, may_differ: bool) -> None:
    """Raise ``CheckpointError`` for what transformers has filled with random numbers."""
    differ = sorted(info["mismatched_keys"])
    if differ and not may_differ:
        name, stored, wanted = differ[0]
        raise CheckpointError(
            f"{path}: {name} is {list(stored)} in the files, but the model's is {list(wanted)}{_more(differ)}"
        )
    lost = sorted(info["missing_keys"])
    if lost and packed:
        raise CheckpointError(f"{path} lacks tensor {lost[0]}{_more(lost)}")


def _more(items: list[Any]) -> str:
    return f", and {len(items) - 1} more" if len(items) > 1 else ""


def _model_config(path: str | Path, where: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a folder or of a model on the hub."""
    text = str(path)
    if Path(path).exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        return read_config(resolve_source(path) / where.get("subfolder", ""))
    return _hub_config(text, where)


def _hub_config(repo: str, where: dict[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(repo, **where)[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{repo}: no such folder, and no config.json of that name on the hub: {reason}"
        ) from error


def _stays_packed(config: dict[str, Any]) -> bool:
    """Whether a format of the registry can keep the weights packed. Raises ``CheckpointError`` for a config of ours
    that cannot be read."""
    method = config.get("quant_method")
    return registry.knows(method) and registry.get(method).why_not_packed(config) is None


def _warn_of_activations(path: str | Path, config: dict[str, Any]) -> None:
    groups = (config.get("config_groups") or {}).values()
    activations = next((g["input_activations"] for g in groups if g.get("input_activations")), None)
    if activations:
        kind = f"{activations.get('type', '')}{activations.get('num_bits', '')}"
        warnings.warn(
            f"{path} asks for {kind} activations (input_activations); here only the weights are quantized, so results "
            "differ from engines that quantize both",
            stacklevel=3,
        )
    if config.get("kv_cache_scheme"):
        warnings.warn(f"{path} asks for a quantized KV cache (kv_cache_scheme); it stays unquantized", stacklevel=3)
