"""Where stochastic rounding's noise comes from: a key for each seed, pass, rank, layer and operand.

The key chooses the bits of every element (:mod:`mxquant.codec.rng`), so that noise is a function of these and
of the element's index, and of nothing that was drawn before. A *pass* is one forward of the whole model
in training, with the backward that belongs to it: a micro-step of gradient accumulation. Recomputing
part of a forward, as gradient checkpointing does, is no new pass and draws the same noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Noise:
    """Seed and pass number of one model's noise, shared by all of its layers.

    ``state``: int64 ``[2]`` on the CPU, seed and number of the current pass. It is a tensor, and is changed
    in place, so that compiled code reads it afresh. Not part of a model's ``state_dict``: save
    :meth:`state_dict` beside it, or set the pass from the step with :meth:`start`.
    """

    def __init__(self, seed: int = 0):
        self.state = torch.tensor([seed, 0], dtype=torch.int64)

    @property
    def seed(self) -> int:
        return int(self.state[0])

    @property
    def passes(self) -> int:
        """Number of the current pass; those of training count from 1."""
        return int(self.state[1])

    def start(self, passes: int) -> None:
        """Say how many passes have been made, after a restart: steps times accumulated micro-steps."""
        self.state[1] = passes

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Forward pre-hook of the whole model: a new pass begins, unless nothing is being trained."""
        if module.training and torch.is_grad_enabled():
            self.state[1] += 1

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state[0], self.state[1] = state["seed"], state["passes"]


def noise_name(operand: str, state: torch.Tensor) -> str:
    """What names the noise of an operand (``layer/role``) in the pass of ``state``, beside its seed.

    Data-parallel ranks see different tokens and must not share the noise of activations and gradients;
    they hold the same weights, whose noise they must share.
    """
    parts = [operand, f"pass {int(state[1])}"]
    if "/weight" not in operand and torch.distributed.is_available() and torch.distributed.is_initialized():
        parts.append(f"rank {torch.distributed.get_rank()}")
    return "/".join(parts)
