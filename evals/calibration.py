"""Running a model on a text to learn what errors in its weights would cost, see :mod:`mxquant.analysis.sensitivity`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mxquant.analysis.sensitivity import Calibration, Sensitivity
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import MXQuantError
from mxquant.evals.experts import holds, inputs_through, is_experts
from mxquant.evals.models import EvalModel
from mxquant.evals.text import EvalText
from mxquant.evals.windows import cut_windows, window_length
from mxquant.transformers.architectures import NameMapper, inventory

WINDOWS, SEQ_LEN = 8, 512
# A parameter's name, and the expert for those that hold the matrices of several.
_Key = tuple[str, int | None]


@dataclass
class _Sums:
    """Sums of squared gradients of a weight over its columns and over its rows, float64, of all windows."""

    rows: Any = 0.0
    columns: Any = 0.0

    def add(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """``x``: inputs ``[..., in_features]``, ``g``: gradients by outputs ``[..., out_features]``, of one window."""
        inputs, gradients = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        squares = (gradients.float().T @ inputs.float()).square_()
        self.rows = self.rows + squares.sum(1).double().cpu()
        self.columns = self.columns + squares.sum(0).double().cpu()


def calibrate(
    model: EvalModel,
    text: EvalText,
    tensors: Iterable[TensorPlan],
    *,
    windows: int = WINDOWS,
    seq_len: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Sensitivities of the matrices in ``tensors``, those of the plan for the same checkpoint.

    One forward and one backward pass for each of the first ``windows`` of ``seq_len`` tokens (None: 512, or the
    model's limit if smaller), with labels that the model draws. Matrices that no token reached are left out.

    Raises ``MXQuantError`` if the text is shorter than one window, or gradients are not finite.
    """
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    length = window_length(seq_len, {model.name: limit}) if seq_len else min(SEQ_LEN, limit or SEQ_LEN)
    tokens = cut_windows(model.tokenizer, text, length, windows)
    sums = _run(model, tokens, torch.Generator().manual_seed(seed), progress or (lambda done, total: None))
    mapper = NameMapper(model.model)
    found = {}
    for t in tensors:
        for index, name in enumerate(t.matrix_names):
            of = sums.get(_key(t, index, mapper))
            if of is None or isinstance(of.rows, float):
                continue
            if not bool(of.rows.isfinite().all() and of.columns.isfinite().all()):
                raise MXQuantError(f"gradients of {name} are not finite on the calibration text; try --dtype float32")
            whole = Sensitivity.from_sums(of.rows, of.columns, tokens.numel())
            found[name] = whole.part(t.place.part, t.place.parts) if t.place else whole
    return Calibration(text.name, tokens.numel(), found)


def _key(t: TensorPlan, index: int, mapper: NameMapper) -> _Key:
    if t.place is None:
        return str(mapper(t.name)), None
    return t.place.parameter, index if t.place.expert is None else t.place.expert


def _run(
    model: EvalModel, tokens: torch.Tensor, generator: torch.Generator, progress: Callable[[int, int], None]
) -> dict[_Key, _Sums]:
    """Sums over all windows, by parameter and expert."""
    net = model.model
    linear = {p.module: p.name for p in inventory(net) if p.is_matrix_product}
    sums: dict[_Key, _Sums] = defaultdict(_Sums)
    with ExitStack() as stack:
        stack.enter_context(_frozen(net))
        stack.callback(net.get_input_embeddings().register_forward_hook(_start_of_the_graph).remove)
        for name, module in net.named_modules():
            if name in linear:
                stack.callback(module.register_forward_hook(_watch(sums[linear[name], None])).remove)
        stack.enter_context(_watched_experts(net, sums))
        for done, window in enumerate(tokens):
            _backward(net, window[None].to(model.device), generator)
            progress(done + 1, len(tokens))
    return sums


def _backward(net: Any, window: torch.Tensor, generator: torch.Generator) -> None:
    """Gradients of the log-probability of labels drawn from the model's own predictions."""
    with torch.enable_grad():
        logits = net(window, use_cache=False).logits[0]
        log_probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
    # Drawn on the CPU, so that the labels are the same on every device.
    drawn = torch.rand(len(logits), 1, generator=generator).to(logits.device)
    reached = log_probabilities.detach().exp().cumsum(-1)
    label = torch.searchsorted(reached, drawn * reached[:, -1:]).clamp(max=logits.shape[-1] - 1)
    log_probabilities.gather(-1, label).sum().backward()


def _start_of_the_graph(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Gradients are wanted from here on, though not of any parameter."""
    return output.detach().requires_grad_()


def _watch(sums: _Sums) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
    return lambda module, inputs, output: _expect(sums, inputs[0], output)


def _expect(sums: _Sums, x: torch.Tensor, output: torch.Tensor) -> None:
    """Add to the sums once the gradient of ``output`` is known."""
    if output.requires_grad and x.numel():
        x = x.detach()
        output.register_hook(lambda g: sums.add(x, g))


class _Products(TorchFunctionMode):
    """Watches products with matrices that lie in larger tensors, known by where they begin in memory."""

    def __init__(self, sums: dict[_Key, _Sums], places: dict[int, _Key]):
        super().__init__()
        self._sums, self._places = sums, places

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear and (key := self._places.get(args[1].data_ptr())):
            _expect(self._sums[key], args[0], output)
        return output


@contextmanager
def _watched_experts(net: torch.nn.Module, sums: dict[_Key, _Sums]) -> Iterator[None]:
    """While this lasts, experts of mixtures multiply one by one, and what they multiply is watched."""
    modules = [module for module in net.modules() if is_experts(module)]
    places: dict[int, _Key] = {
        matrix.data_ptr(): (name, expert)
        for name, tensor in net.named_parameters()
        if tensor.ndim == 3 and holds(net.get_submodule(name.rpartition(".")[0]), name)
        for expert, matrix in enumerate(tensor)
    }
    with inputs_through(lambda x: x, modules), _Products(sums, places) if places else nullcontext():
        yield


@contextmanager
def _frozen(net: torch.nn.Module) -> Iterator[None]:
    """No gradients of parameters: they would take as much memory as the model."""
    before = {p: p.requires_grad for p in net.parameters()}
    for p in before:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, wanted in before.items():
            p.requires_grad_(wanted)
