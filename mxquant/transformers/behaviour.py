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

    ``read``: weights of linear layers that it looks at without calling the layer, such as for their dtype.
    ``ran``: whether the model could be run on fake tensors to the end; if not, there may be more.
    """

    written: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    ran: bool = False


def watch(model: Any) -> Behaviour:
    """Run a twin of ``model``, which may be on the meta device, on a few tokens.

    ``model``: of transformers. Anything may keep a twin from running, such as inputs other than tokens.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            with no_init_weights():
                twin = type(model)._from_config(model.config, dtype=torch.bfloat16).eval()
        except Exception:  # of a model's own code on fake tensors, anything
            return Behaviour()
        _run_experts_without_their_numbers(twin)
        versions, buffers = _versions(twin), _buffers(twin)
        ran = True
        with _reads(twin) as read:
            try:
                twin(**_inputs())
            except Exception:  # as above; what was seen so far was seen
                ran = False
        written = {name for name, version in _versions(twin).items() if version != versions.get(name)}
        replaced = {name for name, buffer in _buffers(twin).items() if buffer != buffers.get(name)}
    return Behaviour(frozenset(written), frozenset(replaced), frozenset(read), ran)


def why_not_running(model: Any) -> str | None:
    """Why a loaded model, all on the meta device, does not run on a few tokens; None if it does or that is unknown."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )

    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        try:
            _run_experts_without_their_numbers(model)
            tensors = [*model.named_parameters(), *model.named_buffers()]
            fake: dict[str, torch.Tensor] = {}
            for name, t in tensors:
                fake[name] = FakeTensor(mode, t.detach().to("meta"), torch.device("cpu"))
            torch.func.functional_call(model, fake, kwargs=_inputs())
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None  # it looks at numbers, which fake tensors do not have
        except Exception as error:  # of a model's own code, anything
            return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def _inputs() -> dict[str, Any]:
    return {"input_ids": torch.zeros(1, _TOKENS, dtype=torch.long), "use_cache": False}


def _run_experts_without_their_numbers(model: Any) -> None:
    """Other implementations of mixtures look at which experts the tokens are meant for."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # of a model without experts
            model.set_experts_implementation("batched_mm")


@contextlib.contextmanager
def _reads(model: nn.Module) -> Iterator[set[str]]:
    """The weights of linear layers that are read while this lasts, other than by calling the layer."""
    read: set[str] = set()
    running: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                stack.callback(setattr, module, "__class__", type(module))
                module.__class__ = _watched(type(module), name, read, running)
                before = module.register_forward_pre_hook(lambda _module, _args, name=name: running.add(name))
                after = module.register_forward_hook(lambda _module, _args, _out, name=name: running.discard(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield read


def _watched(cls: type[nn.Linear], name: str, read: set[str], running: set[str]) -> type[nn.Linear]:
    """A class that notes when its weight is looked up; parameters are, by ``__getattr__``."""

    def look_up(self: nn.Linear, key: str) -> Any:
        if key == "weight" and name not in running:
            read.add(f"{name}.weight")
        return cls.__getattr__(self, key)

    return type(cls.__name__, (cls,), {"__getattr__": look_up})


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
