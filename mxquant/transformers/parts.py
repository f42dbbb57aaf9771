"""Parts of a model that stay dense as a whole: everything but the language model, and what recurrences are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Of what a state space is made of besides its convolution.
STATE_SPACE_REASON = "parameter of a state space"

# Falcon's own linear layer, the product written out.
_FALCON_LINEAR = "FalconLinear"
# Where a mixer has a layer of its own for the step. Kernels read its weight without calling it.
_STEP = "dt_proj"


def language_model(model: Any) -> Callable[[str], bool]:
    """Whether the module of a name belongs to the language model of a multimodal one, by the models' own word.

    It does if the innermost model of transformers around it has the config of the language model.
    Projectors belong to the whole, and so not to it. In a model of text alone everything does, whatever
    models it is made of.
    """
    from transformers import PreTrainedModel

    kind = type(_text_config(model))
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    verdicts = {name: type(module.config) is kind for name, module in models.items()}

    def belongs(name: str) -> bool:
        while name not in verdicts:
            name = name.rpartition(".")[0]
        return verdicts[name]

    head = output_head(model)
    layers = [name for name, module in model.named_modules() if is_plain_linear(module) and module is not head]
    return belongs if any(belongs(name) for name in layers) else lambda name: True


def _text_config(model: Any) -> Any:
    """The config of the language model: what a config says, or, where it says nothing, that of the decoder."""
    text = model.config.get_text_config(decoder=True)
    if text is not model.config or not hasattr(model, "get_decoder"):
        return text
    return getattr(model.get_decoder(), "config", text)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map and nothing else: ``nn.Linear``, GPT-2's ``Conv1D`` or Falcon's
    own, but no subclass that computes more (some routers of experts)."""
    from transformers.pytorch_utils import Conv1D

    if type(module).__name__ == _FALCON_LINEAR:
        return isinstance(module, nn.Linear)
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def output_head(model: Any) -> nn.Module | None:
    """The layer that makes logits, which multimodal models may leave to their language model."""
    head = model.get_output_embeddings()
    if head is None and hasattr(model, "get_decoder"):
        head = model.get_decoder().get_output_embeddings()
    return head


def output_heads(model: Any) -> Callable[[nn.Module], bool]:
    """Whether a module makes outputs: logits, or anything else by a linear layer outside the model's body."""
    head, inside = output_head(model), {id(module) for module in model.base_model.modules()}
    return lambda module: module is head or (isinstance(module, nn.Linear) and id(module) not in inside)


def state_spaces(model: nn.Module) -> set[str]:
    """Names of the parameters that state spaces, and linear attentions with a decay, are made of."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if "A_log" not in own:
            continue
        step = getattr(module, _STEP, None)
        own |= {f"{_STEP}.{name}" for name, _ in step.named_parameters()} if isinstance(step, nn.Module) else set()
        found |= {f"{path}.{name}" if path else name for name in own}
    return found
