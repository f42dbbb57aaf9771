"""One dense model in memory that stands in for many quantized ones.

The weights of its linear layers are replaced by what quantized ones decode to, and restored; its
embeddings, norms and head stay as they are. Nothing is copied but the linear weights themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from mxquant.codec.qtensor import QTensor
from mxquant.errors import MXQuantError
from mxquant.evals import experts
from mxquant.evals.models import EvalModel, answering, takes_positions
from mxquant.ops.operators import dequantize, quantize_activations
from mxquant.schemes.activations import ActivationScheme
from mxquant.transformers.architectures import inventory
from mxquant.transformers.behaviour import watch
from mxquant.transformers.kinds import Kind
from mxquant.transformers.select import Kept, dense_by_accident, selected_by_default


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A parameter to quantize, of the layer ``module``.

    GPT-2 stores it ``transposed``, ``[in_features, out_features]``; the experts of a mixture hold
    several matrices in one parameter, ``[experts, ...]``.
    """

    name: str
    parameter: torch.nn.Parameter
    transposed: bool
    module: torch.nn.Module

    @property
    def matrices(self) -> list[torch.Tensor]:
        """``[out_features, in_features]`` each, views of the parameter."""
        return self.views(self.parameter.data)

    def views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The matrices in a tensor of the parameter's shape."""
        matrices = [data] if data.ndim == 2 else list(data)
        return [m.t() for m in matrices] if self.transposed else matrices

    def decoded(self, packed: Sequence[QTensor]) -> torch.Tensor:
        """What the parameter is when its ``matrices`` are replaced by packed ones."""
        data = torch.empty_like(self.parameter.data)
        for view, q in zip(self.views(data), packed, strict=True):
            view.copy_(dequantize(q, data.dtype))
        return data


def linear_weights(model: Any) -> list[LinearWeight]:
    """The weights that are quantized by default, those of experts included.

    Raises ``MXQuantError`` if a good part of the model's matrices is of a kind that is not known:
    figures of a model that is quantized by half would mislead.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    every = inventory(model, watch(model).written)
    chosen = [
        p for p in selected_by_default(every) if p.kind is Kind.LINEAR or experts.holds(modules[p.module], p.name)
    ]
    matrices = [p for p in every if parameters[p.name].ndim > 1 and not p.kind.expected and p.tied_to is None]
    kept = [Kept(p.name, parameters[p.name].numel(), p.reason or str(p.kind)) for p in matrices if p not in chosen]
    if accident := dense_by_accident(kept, sum(parameters[p.name].numel() for p in matrices)):
        share, (name, _, reason) = accident
        raise MXQuantError(f"{share:.0%} of the weights in matrices would stay dense, e.g. {name} ({reason})")
    found = [LinearWeight(p.name, parameters[p.name], p.transposed, modules[p.module]) for p in chosen]
    if not found:
        raise MXQuantError("the model has no linear layers to quantize")
    return found


Weights = Sequence[torch.Tensor | Sequence[QTensor]]


@contextlib.contextmanager
def weights_in_place(linears: Sequence[LinearWeight], weights: Weights) -> Iterator[None]:
    """While this lasts, the linears hold ``weights``: tensors, or packed matrices, decoded now."""
    dense = [linear.parameter.data for linear in linears]
    try:
        for linear, weight in zip(linears, weights, strict=True):
            linear.parameter.data = weight if isinstance(weight, torch.Tensor) else linear.decoded(weight)
        yield
    finally:
        for linear, data in zip(linears, dense, strict=True):
            linear.parameter.data = data


@contextlib.contextmanager
def inputs_quantized(
    linears: Sequence[LinearWeight], scheme: ActivationScheme, seen: set[torch.nn.Module] | None = None
) -> Iterator[None]:
    """While this lasts, exactly the layers of ``linears`` round their inputs to the scheme first.

    Layers that were called are added to ``seen``: some models multiply by a layer's weight themselves.
    """
    quantize = _Remembering(lambda x: quantize_activations(x, scheme))
    modules = list(dict.fromkeys(linear.module for linear in linears))
    mixtures = [module for module in modules if experts.is_experts(module)]
    called: set[torch.nn.Module] = set() if seen is None else seen

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        called.add(module)
        return None if module in mixtures else (quantize(args[0]), *args[1:])

    handles = [module.register_forward_pre_hook(before) for module in modules]
    try:
        with experts.inputs_through(quantize, mixtures):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Remembering:
    """A function of one tensor that answers a repeated question from memory: q, k and v share their input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._function(x)
        return self._last[1]


@dataclass
class Variant(EvalModel):
    """The dense model, with other weights (and quantized inputs) in its linear layers while it runs.

    ``weights``: one for each of ``linears``, see :func:`weights_in_place`; None leaves them dense.
    ``activations``: how the inputs of ``linears`` are quantized; None for not at all. ``called``: the
    layers whose inputs were, so far.
    """

    linears: list[LinearWeight] = field(default_factory=list)
    weights: Weights | None = None
    activations: ActivationScheme | None = None
    called: set[torch.nn.Module] = field(default_factory=set)

    @classmethod
    def of(cls, dense: EvalModel, name: str, linears: list[LinearWeight], **changes: Any) -> Self:
        """A variant of a loaded dense model, which it shares."""
        return cls(name, dense.source, dense.model, dense.tokenizer, linears=linears, **changes)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this lasts, the shared model *is* this variant."""
        with contextlib.ExitStack() as stack:
            if self.weights is not None:
                stack.enter_context(weights_in_place(self.linears, self.weights))
            if self.activations is not None:
                stack.enter_context(inputs_quantized(self.linears, self.activations, self.called))
            yield

    @contextlib.contextmanager
    def logits(self, tokens: torch.Tensor) -> Iterator[Callable[[int, int], torch.Tensor]]:
        """As in the base class; the body runs at once, the head (always dense) for each piece."""
        tokens = tokens.to(self.device)
        if not takes_positions(self.model):
            with self.in_place():
                whole = self.model(tokens, use_cache=False).logits
            yield lambda start, stop: whole[:, start:stop]
            return
        hidden = self.hidden(tokens)

        def piece(start: int, stop: int) -> torch.Tensor:
            keep = torch.arange(start, stop, device=tokens.device)
            with answering(self.model.base_model, hidden):
                return self.model(tokens, use_cache=False, logits_to_keep=keep).logits

        yield piece

    def hidden(self, tokens: torch.Tensor) -> Any:
        """What the model's body makes of tokens."""
        with self.in_place():
            return self.model.base_model(tokens, use_cache=False)


@dataclass
class RememberingVariant(Variant):
    """A variant that keeps what its body made of each batch, up to ``budget`` bytes.

    The reference of many comparisons: only its head runs again. Hidden states take a fraction of
    the memory of log-probabilities, whose vocabulary is many times their width.
    """

    budget: int = 0
    _kept: dict[bytes, Any] = field(default_factory=dict)

    def hidden(self, tokens: torch.Tensor) -> Any:
        key = tokens.cpu().numpy().tobytes()
        if key in self._kept:
            return self._kept[key]
        hidden = super().hidden(tokens)
        states = hidden.last_hidden_state
        size = states.numel() * states.element_size()
        if size <= self.budget:
            self.budget -= size
            self._kept[key] = type(hidden)(last_hidden_state=states)
        return hidden
