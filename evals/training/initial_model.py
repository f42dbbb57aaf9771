"""Where the models of a study come from: a checkpoint, or a config and random numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mxquant.bundled
from mxquant.checkpoint.formats import registry
from mxquant.errors import CheckpointError, MXQuantError
from mxquant.evals.find_model import find_model, first_line


@dataclass(frozen=True)
class ModelSource:
    """Makes the same model on every call.

    ``pretrained``: a checkpoint's folder or hub id; None for a model from scratch.
    """

    name: str
    config: Any
    tokenizer: Any
    pretrained: str | None = None
    trust_remote_code: bool = False

    def make(self, seed: int) -> Any:
        """The model in fp32: the checkpoint's, or one whose random weights follow from ``seed``."""
        from transformers import AutoModelForCausalLM, set_seed

        set_seed(seed)
        trust = {"trust_remote_code": self.trust_remote_code}
        if self.pretrained is None:
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, **trust)
        try:
            return AutoModelForCausalLM.from_pretrained(self.pretrained, dtype=torch.float32, **trust)
        except Exception as error:  # a loader's boundary, as in `evals.models`
            raise CheckpointError(f"cannot load {self.pretrained}: {first_line(error)}") from error

    def on_meta(self) -> Any:
        """The model without memory for its weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.trust_remote_code)


def from_checkpoint(model: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Train on from a dense checkpoint. Raises ``CheckpointError`` for one that is missing or quantized."""
    source = find_model(model, trust_remote_code=trust_remote_code)
    if source.quant_method is not None:
        raise CheckpointError(
            f"{model} is already quantized ({source.quant_method}), and packed weights cannot be trained; "
            f"start from the dense model{registry.way_to_dense(source.folder)}"
        )
    place = str(source.folder or source.given)
    found = _tokenizer(place, trust_remote_code)
    return _checked(ModelSource(source.name, source.config, found, place, trust_remote_code))


def from_config(config: str | None, tokenizer: str | None) -> ModelSource:
    """Train from scratch, by a ``config.json``; by default the model and tokenizer that ship with mxquant."""
    bundled = str(mxquant.bundled.path())
    name = "the bundled architecture" if config is None else str(config)
    return _checked(ModelSource(name, _read_config(config or bundled), _tokenizer(tokenizer or bundled)))


def _read_config(path: str) -> Any:
    from transformers import AutoConfig

    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        fields = json.loads(file.read_text())
        kind = fields.pop("model_type")
        fields.pop("quantization_config", None)
        return AutoConfig.for_model(kind, **fields)
    except OSError as error:
        raise MXQuantError(f"cannot read config {path}: {error.strerror}") from error
    except KeyError as error:
        raise MXQuantError(f"config {path} has no {error}; it must be a config.json of transformers") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise MXQuantError(f"config {path}: {first_line(error)}") from error


def _tokenizer(place: str, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise CheckpointError(f"cannot load the tokenizer of {place}: {first_line(error)}") from error


def _checked(source: ModelSource) -> ModelSource:
    size = source.config.get_text_config().vocab_size
    if len(source.tokenizer) > size:
        raise MXQuantError(
            f"the tokenizer has {len(source.tokenizer)} tokens, but {source.name} a vocabulary of {size}; "
            "give the tokenizer that belongs to it, or a config with a larger vocab_size"
        )
    return source
