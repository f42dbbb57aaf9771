"""Linear layers that train in FP4, in the place of the ones that a model has."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mxquant.training import functional
from mxquant.training.noise import Noise
from mxquant.training.recipes import LinearFormats


class _FP4:
    """What both layers add to theirs: the formats, the layer's name and the model's noise.

    These are plain attributes: parameters, buffers and ``state_dict`` stay those of the layer.
    """

    formats: LinearFormats
    name: str
    noise: Noise

    def set_up(self, formats: LinearFormats, name: str, noise: Noise) -> None:
        self.formats, self.name, self.noise = formats, name, noise

    def extra_repr(self) -> str:
        texts = {role: text for role, text in self.formats.to_dict().items() if role != "hadamard"}
        same = len({str(text) for text in texts.values()}) == 1
        told = texts["weight"] if same else ", ".join(f"{role}={text}" for role, text in texts.items())
        return f"{super().extra_repr()}, {told}"  # type: ignore[misc]


class FP4Linear(_FP4, nn.Linear):
    """``nn.Linear`` whose three products see quantized operands, see :mod:`mxquant.training.functional`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight, self.bias, self.formats, self.name, self.noise.state)


class FP4Conv1D(_FP4, Conv1D):
    """The same for GPT-2's ``Conv1D``, a linear layer with its weight stored as ``[in, out]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias, self.formats, self.name, self.noise.state)
