"""Which backend serves a call: the only place that chooses one.

A backend (:class:`mxquant.kernels.backend.Backend`) belongs to a type of device and serves a call if
its ``why_not`` has no objection; otherwise the PyTorch reference does, and :func:`explain` says which
of them it is and why.

``MXQUANT_KERNELS=reference`` forces the reference, ``MXQUANT_KERNELS=triton`` the Triton kernels (for
CPU tensors in Triton's interpreter, ``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch

from mxquant.kernels.backend import Backend, Operation
from mxquant.kernels.cpu.backend import CpuBackend
from mxquant.kernels.triton.backend import TritonBackend
from mxquant.schemes.formats import QuantScheme

BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), "cuda": TritonBackend()}


class Served(NamedTuple):
    """Who serves a call: ``by`` a backend or ``"reference"``, and a sentence about it."""

    by: str
    why: str


def backend(device_type: str) -> Backend | None:
    """The kernels for a type of device, or None: see :func:`explain` for the reason."""
    return _backend(device_type)[0]


def choose(
    operation: Operation,
    x: torch.Tensor,
    shape: tuple[int, int],
    scheme: QuantScheme,
    *,
    dtype: torch.dtype | None = None,
    activations: QuantScheme | None = None,
    per_token: bool = False,
) -> Backend | None:
    """The backend that serves an operation (arguments as for ``Backend.why_not``); None: the reference does."""
    found = _backend(x.device.type)[0]
    if found is None:
        return None
    objection = found.why_not(operation, x, shape, scheme, dtype=dtype, activations=activations, per_token=per_token)
    return found if objection is None else None


def explain(
    operation: Operation,
    x: torch.Tensor,
    shape: tuple[int, int],
    scheme: QuantScheme,
    *,
    device_type: str,
    dtype: torch.dtype | None = None,
    activations: QuantScheme | None = None,
    per_token: bool = False,
) -> Served:
    """What serves an operation on a type of device, and why; arguments as for ``Backend.why_not``.

    >>> explain("linear", x, (14336, 4096), scheme, device_type="cuda")
    """
    found, reason = _backend(device_type)
    if found is None:
        return Served("reference", reason)
    objection = found.why_not(operation, x, shape, scheme, dtype=dtype, activations=activations, per_token=per_token)
    if objection is not None:
        return Served("reference", objection)
    return Served(found.name, found.describe(operation, x, scheme))


def _backend(device_type: str) -> tuple[Backend | None, str]:
    forced = os.environ.get("MXQUANT_KERNELS", "")
    if forced == "reference":
        return None, "MXQUANT_KERNELS=reference"
    if forced == "triton":
        device_type = "cuda"
    elif forced:
        raise ValueError(f"MXQUANT_KERNELS={forced!r} is unknown; choose from reference, triton")
    return _available(device_type)


@lru_cache(maxsize=8)
def _available(device_type: str) -> tuple[Backend | None, str]:
    if device_type not in BACKENDS:
        return None, f"there are no kernels for {device_type} tensors"
    found = BACKENDS[device_type]
    reason = found.unavailable()
    return (found, "") if reason is None else (None, reason)
