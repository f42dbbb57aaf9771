"""Which tiles a product uses: the default of :mod:`configs`, or the fastest of its list, measured once.

Measuring is off unless ``MXQUANT_AUTOTUNE=1`` is set or :func:`tune` is called: it synchronizes, and a
choice that depends on timing lets the last bits of results differ between two runs.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import triton

from mxquant.kernels.triton.configs import MULTIPROCESSORS, Config, candidates, shape_class
from mxquant.kernels.triton.linear import plan, terms
from mxquant.schemes.formats import QuantScheme

_chosen: dict[tuple[object, ...], Config] = {}


def choose(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Config:
    """The tiles for this product; arguments as those of :func:`mxquant.kernels.triton.linear.plan`."""
    (m, k), n = x.shape, packed.shape[0]
    if _chosen or os.environ.get("MXQUANT_AUTOTUNE") == "1":
        config = _chosen.get(_key(x, n, scheme))
        if config is not None:
            # Measured for this class of shapes; how often K is cut follows from the shape itself.
            return next(c for c in _list(x, n, scheme) if (c.m, c.n, c.k, c.threads, c.stages) == _tile(config))
        if os.environ.get("MXQUANT_AUTOTUNE") == "1" and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            return tune(x, packed, scale, global_scale, bias, out, scheme)
    return candidates(m, n, k, terms(x.dtype, scheme), _multiprocessors(x.device))[0]


def tune(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scheme: QuantScheme,
) -> Config:
    """Time each candidate on this product and remember the fastest for its class of shapes."""

    def milliseconds(config: Config) -> float:
        launches = plan(x, packed, scale, global_scale, bias, out, scheme, config)

        def run() -> None:
            for launch in launches:
                launch.run()

        return triton.testing.do_bench(run, warmup=5, rep=20)

    best = min(_list(x, packed.shape[0], scheme), key=milliseconds)
    _chosen[_key(x, packed.shape[0], scheme)] = best
    return best


def _list(x: torch.Tensor, n: int, scheme: QuantScheme) -> list[Config]:
    return candidates(x.shape[0], n, x.shape[1], terms(x.dtype, scheme), _multiprocessors(x.device))


def _tile(config: Config) -> tuple[int, ...]:
    return config.m, config.n, config.k, config.threads, config.stages


def _key(x: torch.Tensor, n: int, scheme: QuantScheme) -> tuple[object, ...]:
    return shape_class(x.shape[0]), n, x.shape[1], x.dtype, scheme, x.device


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
