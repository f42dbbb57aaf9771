"""What a model does with its weights besides multiplying by them, seen in one run without numbers.

The model is built and run on fake tensors, which have shapes and dtypes but no memory, so that a model of any
size takes a second. A model that changes a weight as it runs (RWKV divides some of its matrices by powers of
two) cannot have it packed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxquant.transformers.architectures import silent

_TOKENS = 8


@dataclass(frozen=True)
class Behaviour:
    """``written``: parameters that one run changes in place; ``replaced``: buffers that it puts others in place of.

    Both are empty for a model that cannot be run on fake tensors: then nothing is known.
    """

    written: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()


def watch(model: Any) -> Behaviour:
    """Run a twin of ``model``, which may be on the meta device, on a few tokens.

    ``model``: of transformers. Anything that keeps a twin from running, such as inputs other than tokens, makes
    for an empty answer.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            with no_init_weights():
                twin = type(model)._from_config(model.config, dtype=torch.bfloat16).eval()
            _run_experts_without_their_numbers(twin)
            before = _versions(twin), _buffers(twin)
            twin(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False)
        except Exception:  # of a model's own code on fake tensors, anything
            return Behaviour()
        written = {name for name, version in _versions(twin).items() if version != before[0].get(name)}
        replaced = {name for name, buffer in _buffers(twin).items() if buffer != before[1].get(name)}
    return Behaviour(frozenset(written), frozenset(replaced))


def _run_experts_without_their_numbers(model: Any) -> None:
    """Other implementations of mixtures look at which experts the tokens are meant for."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # of a model without experts
            model.set_experts_implementation("batched_mm")


def _versions(model: nn.Module) -> dict[str, int]:
    return {name: parameter._version for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, tuple[int, torch.dtype]]:
    return {name: (id(buffer), buffer.dtype) for name, buffer in model.named_buffers()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's log of what fake tensors could not do, and what transformers says of slow kernels."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with silent():
            yield
    finally:
        logger.disabled = before
