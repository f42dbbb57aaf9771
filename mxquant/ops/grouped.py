"""``mxquant::grouped_linear``: the linear layers of a mixture's experts, their weights packed in one tensor.

Rows of ``x`` are sorted by expert; ``ends[e]`` is the row after the last one of expert ``e``. A backend
with a ``grouped_linear`` takes all experts in one launch; elsewhere they are multiplied one by one.
"""

from __future__ import annotations

import torch

from mxquant.codec.qtensor import QTensor, check_parts
from mxquant.ops import backends
from mxquant.ops import operators as ops
from mxquant.schemes.formats import QuantScheme

_LIBRARY = torch.library.Library("mxquant", "FRAGMENT")
_LIBRARY.define(
    "grouped_linear(Tensor x, Tensor ends, Tensor packed, Tensor scale, Tensor? global_scale, Tensor? bias,"
    " int[] shape, str scheme) -> Tensor"
)


def grouped_linear(
    x: torch.Tensor,
    ends: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: QuantScheme,
    *,
    columns: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y[i] = x[i] @ W[e].T + bias[e]`` for the expert ``e`` that row ``i`` belongs to.

    Parameters
    ----------
    x : ``[rows, columns]`` fp32, bf16 or fp16, sorted by expert.
    ends : int32 ``[experts]``, not decreasing, the last one ``rows``; an expert may have no rows.
    packed, scale : those of one :class:`mxquant.QTensor` an expert, stacked: ``[experts, ...]``.
    global_scale : fp32 ``[experts]``, where the scheme has one.
    columns : input features of each weight. bias : ``[experts, out_features]``.

    Differentiable in ``x`` and ``bias``. Raises ``ValueError`` for parts that do not fit each other.
    """
    shape = [packed.shape[0], packed.shape[1], columns]
    return torch.ops.mxquant.grouped_linear(x, ends, packed, scale, global_scale, bias, shape, scheme.text)


def _grouped(x, ends, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    s = QuantScheme.parse(scheme)
    _check(x, ends, packed, scale, global_scale, bias, shape, s)
    kernels = backends.choose("grouped_linear", x, tuple(shape[1:]), s)
    if kernels is not None:
        return kernels.grouped_linear(x, ends, packed, scale, global_scale, bias, s)
    out = x.new_empty(x.shape[0], shape[1])
    for expert, rows in _spans(ends, x.shape[0]):
        weight = QTensor(*_part(packed, scale, global_scale, expert), shape[1:], s)
        out[rows] = ops.linear(x[rows], weight, None if bias is None else bias[expert])
    return out


def _grouped_fake(x, ends, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    _check(x, ends, packed, scale, global_scale, bias, shape, QuantScheme.parse(scheme))
    return x.new_empty(x.shape[0], shape[1])


def _check(x, ends, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    experts, rows, columns = shape
    if packed.ndim != 3 or scale.ndim != 3 or packed.shape[0] != experts or scale.shape[0] != experts:
        raise ValueError(f"experts must be stacked [{experts}, ...], not {list(packed.shape)} and {list(scale.shape)}")
    if global_scale is not None and tuple(global_scale.shape) != (experts,):
        raise ValueError(f"global scales must be [{experts}], one an expert, not {list(global_scale.shape)}")
    check_parts(packed[0], scale[0], None if global_scale is None else global_scale[:1], (rows, columns), scheme)
    if ends.dtype != torch.int32 or tuple(ends.shape) != (experts,) or ends.device != x.device:
        raise ValueError(f"ends must be int32 [{experts}] beside the activations, not {ends.dtype} {list(ends.shape)}")
    if x.ndim != 2 or x.shape[1] != columns or x.device != packed.device:
        raise ValueError(f"activations {list(x.shape)} on {x.device} do not fit experts of {columns} input features")
    if bias is not None and tuple(bias.shape) != (experts, rows):
        raise ValueError(f"bias must be [{experts}, {rows}], not {list(bias.shape)}")


def _spans(ends: torch.Tensor, rows: int) -> list[tuple[int, slice]]:
    """The experts that have rows, and which. Raises ``ValueError`` if ``ends`` do not cover all rows."""
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    if any(a > b for a, b in zip(starts, stops, strict=True)) or (stops[-1] if stops else 0) != rows:
        raise ValueError(f"ends must not decrease and must end with the number of rows, {rows}")
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, stops, strict=True)) if a < b]


def _part(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, expert: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return packed[expert], scale[expert], None if global_scale is None else global_scale[expert : expert + 1]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, ends, packed, scale, global_scale, bias, shape, scheme = inputs
    ctx.save_for_backward(ends, packed, scale, global_scale)
    ctx.rows, ctx.weight, ctx.bias_dtype = x.shape[0], (shape, scheme), None if bias is None else bias.dtype


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    ends, packed, scale, global_scale = ctx.saved_tensors
    (experts, rows, columns), spec = ctx.weight
    grad_x = grad.new_empty(ctx.rows, columns) if ctx.needs_input_grad[0] else None
    wanted = ctx.bias_dtype is not None and ctx.needs_input_grad[5]
    grad_bias = grad.new_zeros(experts, rows, dtype=torch.float32) if wanted else None
    for expert, span in _spans(ends, ctx.rows):
        if grad_x is not None:
            weight = QTensor(*_part(packed, scale, global_scale, expert), (rows, columns), QuantScheme.parse(spec))
            grad_x[span] = ops.linear_grad(grad[span], weight)
        if grad_bias is not None:
            grad_bias[expert] = grad[span].sum(0, dtype=torch.float32)
    return grad_x, None, None, None, None, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None, None


_LIBRARY.impl("grouped_linear", _grouped, "CompositeExplicitAutograd")
torch.library.register_fake("mxquant::grouped_linear", _grouped_fake, lib=_LIBRARY)
torch.library.register_autograd("mxquant::grouped_linear", _backward, setup_context=_setup, lib=_LIBRARY)
