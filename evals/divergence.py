"""How far a model's predictions are from a baseline's.

Perplexity alone hides damage: errors that help some tokens cancel those that hurt others. The
divergence of the whole distribution does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.evals.intervals import Interval, bootstrap_interval

# exp of more overflows a float64.
LARGEST_NLL = 700.0


@dataclass(frozen=True)
class Divergence:
    """A model against its baseline on the same windows.

    Attributes
    ----------
    kl : mean over tokens of KL(baseline || model), in nats.
    agreement : share of tokens, 0 to 1, whose most likely next token is the same in both.
    ratio : the model's perplexity divided by the baseline's.
    kl_interval, agreement_interval, ratio_interval : 95 % confidence, None for few windows; see
        :func:`mxquant.evals.intervals.bootstrap_interval`.
    """

    kl: float
    agreement: float
    ratio: float
    kl_interval: Interval | None
    agreement_interval: Interval | None
    ratio_interval: Interval | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "kl": self.kl,
            "kl_interval": self.kl_interval,
            "top1_agreement": self.agreement,
            "top1_agreement_interval": self.agreement_interval,
            "perplexity_ratio": self.ratio,
            "perplexity_ratio_interval": self.ratio_interval,
        }


def token_kl(baseline: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """KL(baseline || model) of each position, in nats.

    Both are log-probabilities, fp32 ``[..., vocabulary]``; the result is fp32 ``[...]``. A token
    that the baseline rules out adds nothing. Equal inputs give exactly zero.
    """
    probability = baseline.exp()
    terms = torch.where(probability > 0, probability * (baseline - model), 0.0)
    return terms.sum(-1)


def token_agreement(baseline: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Whether the most likely token is the same: bool ``[...]`` of two ``[..., vocabulary]``."""
    return baseline.argmax(-1) == model.argmax(-1)


def summarize(
    baseline_nll: torch.Tensor, model_nll: torch.Tensor, kl: torch.Tensor, agreement: torch.Tensor
) -> Divergence:
    """The divergence from one number a window each, all float64 ``[windows]``.

    ``baseline_nll`` and ``model_nll`` are mean NLLs in nats, ``kl`` a mean in nats, ``agreement``
    a share. The ratio's interval is that of the *paired* differences of NLL: a window that is hard
    for both says nothing about the quantization.
    """
    difference = (model_nll - baseline_nll).double()
    interval = bootstrap_interval(difference)
    return Divergence(
        kl=kl.mean().item(),
        agreement=agreement.mean().item(),
        ratio=_exp(difference.mean().item()),
        kl_interval=bootstrap_interval(kl),
        agreement_interval=bootstrap_interval(agreement),
        ratio_interval=None if interval is None else (_exp(interval[0]), _exp(interval[1])),
    )


def _exp(nats: float) -> float:
    return math.exp(min(nats, LARGEST_NLL))
