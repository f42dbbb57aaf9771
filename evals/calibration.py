"""Running a model on a text to learn what errors in its weights would cost, see :mod:`mxquant.analysis.sensitivity`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.analysis.sensitivity import Calibration, Sensitivity
from mxquant.errors import MXQuantError
from mxquant.evals.models import EvalModel
from mxquant.evals.text import EvalText
from mxquant.evals.windows import cut_windows, window_length
from mxquant.transformers.architectures import NameMapper, inventory

WINDOWS, SEQ_LEN = 8, 512


@dataclass
class _Sums:
    """Over tokens: ``|x|^2 g_i^2`` and ``|g|^2 x_j^2``, float64."""

    rows: Any = 0.0
    columns: Any = 0.0

    def add(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """``x``: ``[..., in_features]``, ``g``: ``[..., out_features]``, of the same tokens."""
        x2 = x.reshape(-1, x.shape[-1]).float().square()
        g2 = g.reshape(-1, g.shape[-1]).float().square()
        self.rows = self.rows + (x2.sum(-1) @ g2).double().cpu()
        self.columns = self.columns + (g2.sum(-1) @ x2).double().cpu()


def calibrate(
    model: EvalModel,
    text: EvalText,
    names: Iterable[str],
    *,
    windows: int = WINDOWS,
    seq_len: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Sensitivities of linear weights, by the ``names`` that they have in the checkpoint.

    One forward and one backward pass for each of the first ``windows`` of ``seq_len`` tokens (None: 512, or the
    model's limit if smaller), with labels that the model draws. Weights that no token reached are left out.

    Raises ``MXQuantError`` if the text is shorter than one window, or gradients are not finite.
    """
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    length = window_length(seq_len, {model.name: limit}) if seq_len else min(SEQ_LEN, limit or SEQ_LEN)
    tokens = cut_windows(model.tokenizer, text, length, windows)
    sums = _run(model, tokens, torch.Generator().manual_seed(seed), progress or (lambda done, total: None))
    mapper = NameMapper(model.model)
    found = {}
    for name in names:
        of = sums.get(str(mapper(name)).removesuffix(".weight"))
        if of is None or isinstance(of.rows, float):
            continue
        if not bool(of.rows.isfinite().all() and of.columns.isfinite().all()):
            raise MXQuantError(f"gradients of {name} are not finite on the calibration text; try --dtype float32")
        found[name] = Sensitivity.from_sums(of.rows, of.columns, tokens.numel())
    return Calibration(text.name, tokens.numel(), found)


def _run(
    model: EvalModel, tokens: torch.Tensor, generator: torch.Generator, progress: Callable[[int, int], None]
) -> dict[str, _Sums]:
    """Sums over all windows, by the name of the linear module."""
    net = model.model
    linear = {p.module for p in inventory(net) if p.is_matrix_product}
    sums: dict[str, _Sums] = {}
    with ExitStack() as stack:
        stack.enter_context(_frozen(net))
        stack.callback(net.get_input_embeddings().register_forward_hook(_start_of_the_graph).remove)
        for name, module in net.named_modules():
            if name in linear:
                stack.callback(module.register_forward_hook(_watch(sums.setdefault(name, _Sums()))).remove)
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
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            x = inputs[0].detach()
            output.register_hook(lambda g: sums.add(x, g))

    return hook


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
