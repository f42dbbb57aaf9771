"""Perplexity over non-overlapping windows, and divergence from a baseline on the same windows.

The perplexity is ``exp`` of the mean negative log-likelihood over all predicted tokens; how a text
becomes windows is described in :mod:`mxquant.evals.windows`. Log-probabilities are fp32, sums float64.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mxquant.errors import MXQuantError
from mxquant.evals.divergence import LARGEST_NLL, Divergence, summarize, token_agreement, token_kl
from mxquant.evals.find_model import Source
from mxquant.evals.models import EvalModel
from mxquant.evals.text import EvalText
from mxquant.evals.windows import bos_token, cut_windows, window_length

# Logits handled at once: 64 MB in fp32, whatever the vocabulary.
_CHUNK_LOGITS = 1 << 24


@dataclass
class Perplexity:
    """What one model did on one text.

    Attributes
    ----------
    window_nll : float64 ``[windows]``, mean negative log-likelihood of each window in nats.
    tokens : predicted tokens in all.
    seconds : time in the model, tokenizing and comparing not included.
    divergence : against the baseline; None without one.
    problem : why there is no perplexity, e.g. logits that are not finite; None if there is one.
    cached : not measured this time.
    """

    name: str
    window_nll: torch.Tensor
    tokens: int
    seq_len: int
    bos: bool
    seconds: float
    divergence: Divergence | None = None
    problem: str | None = None
    cached: bool = False

    @property
    def windows(self) -> int:
        return len(self.window_nll)

    @property
    def perplexity(self) -> float | None:
        return None if self.problem else math.exp(self.window_nll.mean().item())

    def to_dict(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "nll": None if self.problem else self.window_nll.mean().item(),
            "problem": self.problem,
            "cached": self.cached,
            "windows": self.windows,
            "seq_len": self.seq_len,
            "bos": self.bos,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": None if self.problem else self.tokens / max(self.seconds, 1e-9),
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
        }


def evaluate(
    models: Sequence[EvalModel],
    text: EvalText | str | torch.Tensor,
    *,
    baseline: EvalModel | None = None,
    seq_len: int | None = None,
    windows: int | None = None,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Perplexity]:
    """Perplexity of every model on a text, and with a ``baseline`` the divergence from it.

    Instead of a text it may be windows that :func:`mxquant.evals.windows.cut_windows` made before.

    With a baseline its result comes first, and all models run side by side, window by window, so
    that each of its log-probabilities is computed once and none is stored. ``windows`` limits their
    number, ``batch_size`` counts windows, ``progress(done, total)`` is called after every batch; it
    counts windows of all models.

    A model whose logits are not finite gets a ``problem`` and no perplexity. Raises
    ``MXQuantError`` if that happens to the baseline, if a model's vocabulary or tokenizer is not
    the baseline's, or if the text is too short.
    """
    if batch_size < 1:
        raise MXQuantError(f"cannot evaluate batches of {batch_size} windows; use --batch-size 1 or more")
    everyone = list(models) if baseline is None else [baseline, *models]
    if isinstance(text, torch.Tensor):
        seq_len = text.shape[1]
    limits = {m.name: getattr(m.model.config.get_text_config(), "max_position_embeddings", None) for m in everyone}
    length = window_length(seq_len, limits)
    if baseline is not None:
        check_vocabularies(everyone)
    cut = [_windows(m, text, length, windows) for m in everyone]
    done, total = 0, sum(map(len, cut))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    if baseline is not None:
        _check_tokens(everyone, cut)
        tallies = _score(everyone, cut[0], batch_size, advance)
    else:
        tallies = [_score([m], w, batch_size, advance)[0] for m, w in zip(everyone, cut, strict=True)]
    bos = [bos_token(m.tokenizer) is not None for m in everyone]
    return [tally.result(tallies[0], length, b) for tally, b in zip(tallies, bos, strict=True)]


def _windows(model: EvalModel, text: EvalText | str | torch.Tensor, length: int, limit: int | None) -> torch.Tensor:
    return text[:limit] if isinstance(text, torch.Tensor) else cut_windows(model.tokenizer, text, length, limit)


@dataclass
class _Tally:
    """Sums over the windows of one model; ``kl`` and ``agreement`` only beside a baseline."""

    model: EvalModel
    compared: bool
    seconds: float = 0.0
    problem: str | None = None
    nll: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    agreement: list[torch.Tensor] = field(default_factory=list)

    def result(self, baseline: _Tally, seq_len: int, bos: bool) -> Perplexity:
        nll = torch.cat(self.nll)
        divergence = None
        if self.problem is None and nll.mean() > LARGEST_NLL:
            self.problem = f"its mean NLL of {nll.mean():.0f} nats is too large for a perplexity"
        if self.compared and self.problem is None:
            divergence = summarize(torch.cat(baseline.nll), nll, torch.cat(self.kl), torch.cat(self.agreement))
        tokens = len(nll) * (seq_len - 1)
        return Perplexity(self.model.name, nll, tokens, seq_len, bos, self.seconds, divergence, self.problem)


def check_vocabularies(everyone: Sequence[EvalModel | Source]) -> None:
    """Raise ``MXQuantError`` unless all have as many tokens as the first one, the baseline."""
    baseline = everyone[0]
    for model in everyone[1:]:
        if model.vocab_size != baseline.vocab_size:
            raise MXQuantError(
                f"{model.name} has a vocabulary of {model.vocab_size} tokens and the baseline {baseline.name} "
                f"one of {baseline.vocab_size}; a baseline must be the model that was quantized"
            )


def _check_tokens(everyone: list[EvalModel], cut: list[torch.Tensor]) -> None:
    baseline = everyone[0]
    for model, windows in zip(everyone[1:], cut[1:], strict=True):
        if not torch.equal(windows, cut[0]):
            raise MXQuantError(
                f"the tokenizer of {model.name} cuts the text differently from that of the baseline {baseline.name}; "
                "a baseline must be the model that was quantized"
            )


def _score(
    models: list[EvalModel], windows: torch.Tensor, batch_size: int, advance: Callable[[int], None]
) -> list[_Tally]:
    """Run the models side by side; all but the first are compared with the first."""
    tallies = [_Tally(model, compared=i > 0) for i, model in enumerate(models)]
    with torch.inference_mode():
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            _score_batch([t for t in tallies if t.problem is None], batch, start)
            advance(len(batch) * len(models))
            if problem := tallies[0].problem:
                if len(models) > 1:
                    raise MXQuantError(f"baseline {models[0].name}: {problem}")
                break
    return tallies


def _score_batch(tallies: list[_Tally], batch: torch.Tensor, first: int) -> None:
    """Add windows (int64 ``[batch, length]``) to the tallies; the first one is the reference."""
    sums: list[list[torch.Tensor]] = [[] for _ in tallies]
    with contextlib.ExitStack() as stack:
        pieces = [stack.enter_context(tally.model.logits(batch)) for tally in tallies]
        width = max(tally.model.vocab_size for tally in tallies) if tallies else 1
        for start, stop in _ranges(batch.shape[1] - 1, _CHUNK_LOGITS // (width * len(batch))):
            reference = None
            for tally, piece, parts in zip(tallies, pieces, sums, strict=True):
                with _clock(tally):
                    log_probabilities = torch.log_softmax(piece(start, stop), -1, dtype=torch.float32)
                target = batch[:, start + 1 : stop + 1].to(log_probabilities.device)
                parts.append(_measure(log_probabilities, target, reference if tally.compared else None))
                reference = log_probabilities if reference is None else reference
    for tally, parts in zip(tallies, sums, strict=True):
        _add(tally, sum(parts) / (batch.shape[1] - 1), first)  # type: ignore[arg-type]


def _measure(log_probabilities: torch.Tensor, target: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """Sums over positions of NLL, KL and agreement: float64 ``[3, batch]`` on the CPU."""
    nll = -log_probabilities.gather(-1, target[..., None])[..., 0]
    if reference is None:
        kl = agreement = torch.zeros_like(nll)
    else:
        reference = reference.to(log_probabilities.device)
        kl, agreement = token_kl(reference, log_probabilities), token_agreement(reference, log_probabilities)
    return torch.stack([x.cpu().double().sum(1) for x in (nll, kl, agreement)])


def _add(tally: _Tally, means: torch.Tensor, first: int) -> None:
    finite = means.isfinite().all(0)
    if not finite.all():
        window = first + int((~finite).nonzero()[0])
        tally.problem = f"its logits are not finite in window {window}, so there is no perplexity"
    for column, values in zip((tally.nll, tally.kl, tally.agreement), means, strict=True):
        column.append(values)


def _ranges(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, max(1, step)):
        yield start, min(start + max(1, step), length)


@contextlib.contextmanager
def _clock(tally: _Tally) -> Iterator[None]:
    """Add the time spent inside to the tally, waiting for the GPU where there is one."""
    began = time.perf_counter()
    yield
    if tally.model.device.type == "cuda":
        torch.cuda.synchronize(tally.model.device)
    tally.seconds += time.perf_counter() - began
