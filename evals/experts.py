"""Mixtures of experts whose weights lie in one parameter each, ``[experts, out_features, in_features]``.

transformers gives all such modules the same interface (``use_experts_implementation``), so that
one forward pass serves them; here it is written with a place to quantize inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mxquant.evals.models import forward_is

Quantize = Callable[[torch.Tensor], torch.Tensor]

_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is a mixture of experts with the interface of transformers."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate"))


def holds(module: torch.nn.Module, parameter: str) -> bool:
    """Whether the parameter of this (full) name holds the matrices of the module's experts."""
    return is_experts(module) and parameter.rpartition(".")[2] in _MATRICES


def is_transposed(module: Any) -> bool:
    """Whether the matrices are stored ``[in_features, out_features]``."""
    return bool(module.is_transposed)


@contextlib.contextmanager
def inputs_through(quantize: Quantize, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """While this lasts, every matrix of the experts sees its input through ``quantize``."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(forward_is(module, partial(forward, module, quantize)))
        yield


def forward(
    module: Any, quantize: Quantize, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``[tokens, hidden]`` through each token's experts, ``[tokens, k]``, summed by their weights."""
    inputs = quantize(hidden_states)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    out = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if expert >= module.num_experts:  # a place holder for experts of another device
            continue
        token, slot = torch.where(top_k_index == expert)
        h = _linear(module, first, expert, inputs[token])
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        h = _linear(module, "down_proj", expert, quantize(h))
        if getattr(module, "has_post_expert_norm", False):  # not in transformers 5.17
            h = module.post_expert_norm(h)
        out.index_add_(0, token, (h * top_k_weights[token, slot, None]).to(out.dtype))
    return out


def _linear(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(x, weight.t() if module.is_transposed else weight, bias)
