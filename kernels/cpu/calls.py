"""Calls of the linear kernel that are prepared once for a layer: what they need of its weight is already in C."""

from __future__ import annotations

from ctypes import addressof

import torch

from mxquant.kernels.cpu.library import DTYPES, LinearWeight, ScaleFormat, check, library
from mxquant.schemes.formats import QuantScheme


class LinearCall:
    """``x @ W.T + bias`` for one packed weight, many times.

    It refers to the memory of the tensors that it was made from, which must be contiguous and on the
    CPU; ask :meth:`holds` before each use whether they are still the ones meant.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
        table: torch.Tensor,
    ):
        fmt = scheme.scale_format
        self._n, self._k = shape
        self._tensors, self._table = (packed, scale, global_scale, bias), table
        self._places = self._where()
        self._weight = LinearWeight(
            packed.data_ptr(), scale.data_ptr(), table.data_ptr(), None if bias is None else bias.data_ptr(),
            None if global_scale is None else global_scale.data_ptr(),
            *shape, 0 if bias is None else DTYPES[bias.dtype], *scheme.block_shape, 0,
            ScaleFormat(fmt.mantissa_bits, fmt.bias, fmt.max_code, 0.0),
        )  # fmt: skip
        self._address, self._function = addressof(self._weight), library().mxq_linear

    def holds(
        self, packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> bool:
        """Whether these are the tensors it was made from, and still where they were."""
        mine = self._tensors
        same = packed is mine[0] and scale is mine[1] and global_scale is mine[2] and bias is mine[3]
        return same and self._where() == self._places

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The product; None for activations that the kernel does not take."""
        size, dtype = list(x.shape), DTYPES.get(x.dtype)
        if dtype is None or not size or size[-1] != self._k or x.numel() == 0:
            return None
        size[-1] = self._n
        x, y = x.contiguous(), x.new_empty(size)
        rows = x.numel() // self._k
        status = self._function(self._address, x.data_ptr(), y.data_ptr(), rows, dtype, torch.get_num_threads())
        if status:
            check(status)
        return y

    def _where(self) -> tuple[object, ...]:
        packed, scale, global_scale, bias = self._tensors
        if bias is None and global_scale is None:
            return packed.data_ptr(), scale.data_ptr()
        of_scale = None if global_scale is None else global_scale.data_ptr()
        of_bias = None if bias is None else (bias.data_ptr(), bias.dtype)
        return packed.data_ptr(), scale.data_ptr(), of_scale, of_bias

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copied and pickled as None: addresses mean nothing elsewhere."""
        return type(None), ()
