"""The largest magnitude of a tensor, and of tensors that share a global scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def tensor_amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a tensor as a 0-dim fp32 tensor; NaN if it holds one."""
    # Two reductions over the weight as it is beat one over an fp32 copy of its magnitudes.
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high).to(torch.float32)


def group_amax(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of several tensors, on the device of the first; NaN if one of them holds one.

    Layers that engines fuse share the global scale that this asks for.
    """
    found = [tensor_amax(weight) for weight in weights]
    return torch.stack([amax.to(found[0].device) for amax in found]).amax()
