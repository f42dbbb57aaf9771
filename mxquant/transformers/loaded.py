"""A checkpoint loaded as its users load it, seen as a dense model: what must be compared with the files."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mxquant.checkpoint.formats import compressed_tensors, native
from mxquant.checkpoint.formats.gpt_oss import GptOssFormat
from mxquant.checkpoint.reader import read_config
from mxquant.errors import CheckpointError
from mxquant.nn.quant_linear import QuantLinear
from mxquant.transformers import register
from mxquant.transformers.classes import auto_class
from mxquant.transformers.experts import QuantExperts
from mxquant.transformers.loading import load
from mxquant.transformers.trial import quiet

# Tokens of the forward pass: enough for every kind of mask, few enough for any model.
_TOKENS = 8


def why_not_loadable(method: str | None) -> str | None:
    """Why ``from_pretrained`` here cannot load checkpoints of a ``quant_method`` (None: dense); None if it can."""
    from transformers.utils import is_compressed_tensors_available

    if method == compressed_tensors.QUANT_METHOD and not is_compressed_tensors_available():
        return "compressed-tensors, which transformers needs for it, is not installed"
    if method not in (None, native.QUANT_METHOD, compressed_tensors.QUANT_METHOD, GptOssFormat.method):
        return f"transformers loads no {method} without its vendor's library"
    return None


def load_as_users_do(
    folder: Path, method: str | None, *, trust_remote_code: bool = False, keep_packed: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The model and the loading info of ``from_pretrained``, with the class that the config asks for.

    ``keep_packed``: by :func:`mxquant.load` instead. Raises whatever the loader raises.
    """
    register()
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if trust_remote_code:
        options["trust_remote_code"] = True
    if method == GptOssFormat.method:
        from transformers.utils.quantization_config import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with quiet(), torch.random.fork_rng(devices=[]):
        if keep_packed:
            model, info = load(folder, **options)
        else:
            model, info = auto_class(read_config(folder)).from_pretrained(folder, **options)
    return model.eval(), info


def decompress(model: Any) -> None:
    """Have compressed-tensors decode its layers, as it does at the first forward pass; nothing if it has."""
    if hasattr(model, "ct_decompress_hook"):
        with quiet():
            model.hf_quantizer.compressor.decompress_model(model)


class Held(NamedTuple):
    """A tensor of a model as a dense model would hold it: its dtype, and a function that reads it."""

    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def dense_tensors(model: nn.Module, transposed: Collection[str]) -> dict[str, Held]:
    """Parameters and persistent buffers by name; packed weights are decoded when they are read, to fp32.

    ``transposed``: weights of layers that a dense model stores as ``[in, out]``.
    """
    found: dict[str, Held] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        module = modules.get(path)
        if isinstance(module, QuantLinear) and leaf in module._buffers:
            weight = f"{path}.weight"
            found[weight] = Held(torch.float32, partial(_weight, module, weight in transposed))
        elif isinstance(module, QuantExperts) and leaf in module._buffers:
            if leaf in module.entries:
                found[name] = Held(torch.float32, partial(module.dequantize, leaf))
        elif hasattr(module, "quantization_scheme") and leaf not in ("weight", "bias"):
            continue  # scales that compressed-tensors keeps beside the decoded weight
        else:
            found[name] = Held(tensor.dtype, tensor.detach)
    return found


def _weight(layer: QuantLinear, transposed: bool) -> torch.Tensor:
    return layer.dequantize().t() if transposed else layer.dequantize()


def why_not_tokens(model: Any) -> str | None:
    """Why the model cannot be run on tokens alone, by the signature of its class; None if it can."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return f"{type(model).__name__} needs {model.main_input_name}"
    needed = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "input_ids"
    ]
    return f"{type(model).__name__} needs {', '.join(needed)}" if needed else None


def run_on_tokens(model: Any) -> torch.Tensor:
    """What the model makes of a few tokens: its logits, or the first tensor where it makes none.

    Raises whatever the model raises.
    """
    device = next(model.parameters()).device
    inputs = {"input_ids": _tokens(model.config).to(device)}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with quiet(), torch.no_grad():
        output = model(**inputs)
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def fails_alike(model: Any, dtype: torch.dtype, error: Exception) -> bool:
    """Whether a dense twin with random weights fails with such an error, too: then the checkpoint is not to blame.

    ``model``: of the twin's class and config, which may be on the meta device.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            twin = type(model)._from_config(config, dtype=dtype).eval()
        run_on_tokens(twin)
    except Exception as other:  # of a model's own code, anything
        return type(other) is type(error)
    return False


def _tokens(config: Any) -> torch.Tensor:
    """Tokens ``[1, 8]`` that stand for text: none that a config names, such as the place of an image."""
    text = config.get_text_config()
    configs = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]
    named: set[int] = set()
    for one in configs:
        said = {} if one is None else one.to_dict()
        named |= {v for k, v in said.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    plain = [token for token in range(min(text.vocab_size, 4 * _TOKENS + len(named))) if token not in named]
    if not plain:
        raise CheckpointError("the config names every token of the vocabulary")
    return torch.tensor([[plain[i % len(plain)] for i in range(_TOKENS)]])
