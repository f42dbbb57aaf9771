"""The operators ``mxquant::quantize``, ``dequantize``, ``linear``, ``quantized_linear`` and their helpers.

Each has a schema, a fake implementation (shapes only, for tracing) and a PyTorch reference that
runs on any device. A scheme travels as the string ``QuantScheme.text``.

:mod:`mxquant.ops.backends` chooses who serves a call: compiled kernels, or the reference. A
``QuantLinear`` on a CPU asks once and again when its tensors are replaced.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import _C

from mxquant.codec import rounding
from mxquant.codec.dynamic import quantize_dynamically
from mxquant.codec.numerics import scale_dtype
from mxquant.codec.qtensor import QTensor, check_parts, dequantize_parts
from mxquant.codec.rng import derive_key
from mxquant.kernels.backend import PreparedLinear
from mxquant.ops import backends
from mxquant.schemes.activations import ActivationScheme
from mxquant.schemes.formats import ELEMENTS, QuantScheme

_LIBRARY = torch.library.Library("mxquant", "DEF")
_LIBRARY.define(
    "quantize(Tensor weight, str scheme, int seed, str name, Tensor? global_scale) -> (Tensor, Tensor, Tensor?)"
)
_LIBRARY.define(
    "dequantize(Tensor packed, Tensor scale, Tensor? global_scale, int[] shape, str scheme, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(
    "quantized_linear(Tensor x, Tensor packed, Tensor scale, Tensor? global_scale, Tensor? bias, int[] shape,"
    " str scheme, str activations, bool per_token) -> Tensor"
)
_LIBRARY.define("quantize_activations(Tensor x, str scheme, bool per_token) -> Tensor")
_LIBRARY.define(
    "linear_grad(Tensor grad, Tensor packed, Tensor scale, Tensor? global_scale, int[] shape, str scheme) -> Tensor"
)
_LIBRARY.define(
    "linear(Tensor x, Tensor packed, Tensor scale, Tensor? global_scale, Tensor? bias, int[] shape, str scheme)"
    " -> Tensor"
)


def quantize(
    weight: torch.Tensor,
    scheme: QuantScheme,
    *,
    seed: int = 0,
    name: str = "weight",
    global_scale: torch.Tensor | None = None,
) -> QTensor:
    """Quantize a weight ``[out_features, in_features]`` (fp32, bf16 or fp16) to a :class:`QTensor`.

    ``seed`` and ``name`` choose the random bits of stochastic rounding; ``global_scale`` (fp32,
    one number) replaces the one derived from the weight. Raises ``WeightError`` for NaN, infinite
    or non-matrix weights, naming the place.
    """
    packed, scale, made = torch.ops.mxquant.quantize(weight.detach(), scheme.text, seed, name, global_scale)
    return QTensor(packed, scale, made, (weight.shape[0], weight.shape[1]), scheme)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The dense weight ``[out_features, in_features]``: the bits of ``q.dequantize(dtype)``, by kernels where
    there are some."""
    return torch.ops.mxquant.dequantize(q.packed, q.scale, q.global_scale, list(q.shape), q.scheme.text, dtype)


def fake_quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    *,
    seed: int = 0,
    name: str = "weight",
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What ``x`` decodes to after quantization: shape, dtype and device of ``x``; no gradient.

    ``x``: ``[..., columns]``; its leading dimensions are the rows. Values are the codec's, in fp32,
    rounded once to the dtype of ``x``; other arguments and errors as for :func:`quantize`.
    """
    q = quantize(x.reshape(-1, x.shape[-1]), scheme, seed=seed, name=name, global_scale=global_scale)
    return dequantize(q, x.dtype).view(x.shape)


def quantize_activations(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """What activations ``[..., features]`` (fp32, bf16, fp16) decode to after quantization.

    Shape, dtype and device are those of ``x``. Scales are found anew for each call. A token that is
    not finite becomes NaN; with one global scale for the whole tensor, so do all others. The
    gradient passes straight through.
    """
    return torch.ops.mxquant.quantize_activations(x, scheme.scheme.text, scheme.per_token)


def linear(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with the weight packed.

    ``x``: ``[..., in_features]`` fp32, bf16 or fp16; the result ``[..., out_features]`` has its
    dtype. Differentiable in ``x`` and ``bias``.
    """
    return torch.ops.mxquant.linear(
        x, weight.packed, weight.scale, weight.global_scale, bias, list(weight.shape), weight.scheme.text
    )


def linear_grad(grad: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """``grad @ weight``: from the gradient ``[..., out_features]`` of :func:`linear`'s result to that of its ``x``."""
    return torch.ops.mxquant.linear_grad(
        grad, weight.packed, weight.scale, weight.global_scale, list(weight.shape), weight.scheme.text
    )


def quantized_linear(
    x: torch.Tensor, weight: QTensor, activations: ActivationScheme, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``Q(x) @ weight.T + bias``: :func:`linear` of what :func:`quantize_activations` makes of ``x``.

    Where tensor cores multiply both formats (MXFP4, NVFP4 on some chips), they do; else the rounded
    activations are multiplied in their dtype. The gradient passes straight through the rounding.
    """
    return torch.ops.mxquant.quantized_linear(
        x,
        weight.packed,
        weight.scale,
        weight.global_scale,
        bias,
        list(weight.shape),
        weight.scheme.text,
        activations.scheme.text,
        activations.per_token,
    )


def needs_no_dispatcher(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether calling a CPU kernel with ``x`` without PyTorch's dispatcher changes nothing.

    The dispatcher costs more than a small layer's work; ``benchmarks/generate_speed.py`` measures what a
    whole model gains without it. It is needed for gradients, tracing, compiling, ``torch.func`` and
    modes that watch operators.
    """
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or not x.is_cpu:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    if _C._len_torch_dispatch_stack() or _C._is_torch_function_mode_enabled():
        return False
    return _C._functorch.peek_interpreter_stack() is None and _C._get_tracing_state() is None


def linear_call(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    scheme: QuantScheme,
) -> PreparedLinear | None:
    """:func:`linear` with these parts of a weight as a call of a CPU kernel; None if there is no kernel for it.

    The arguments are trusted. The call takes activations for which :func:`needs_no_dispatcher`
    holds, and answers None to those that it does not know.
    """
    kernels = backends.backend("cpu")
    return None if kernels is None else kernels.prepare_linear(packed, scale, global_scale, bias, shape, scheme)


def exact_in(dtype: torch.dtype, scheme: QuantScheme) -> bool:
    """Whether every decoded weight of the scheme is a number of ``dtype``, so that a matrix
    product in ``dtype`` sees the weight unchanged.

    bf16 has 8 significant bits and fp32's exponents: enough for the product of an element and a
    block scale whose significands need at most 8 bits together, but not for a quotient by a global
    scale. fp16's exponents are too few for every format.
    """
    if dtype == torch.float32:
        return True
    scale = scheme.scale_format
    bits = ELEMENTS[scheme.element].mantissa_bits + scale.mantissa_bits + 2
    return dtype == torch.bfloat16 and not scheme.global_scale and (scale.exponent_only or bits <= 8)


def quantize_rows(
    rows: torch.Tensor,
    scheme: QuantScheme,
    key: int,
    global_scale: torch.Tensor | None,
    first_row: int,
    with_stats: bool,
) -> rounding.QuantizedRows | None:
    """:func:`mxquant.codec.rounding.quantize_rows`, by kernels where there are some. For ``RowQuantizer``."""
    kernels = backends.choose("quantize_rows", rows, (rows.shape[0], rows.shape[1]), scheme)
    serve = rounding.quantize_rows if kernels is None else kernels.quantize_rows
    return serve(rows, scheme, key, global_scale, first_row, with_stats)


def quantize_tensor(
    weight: torch.Tensor,
    scheme: QuantScheme,
    *,
    seed: int = 0,
    name: str = "weight",
    global_scale: torch.Tensor | None = None,
) -> QTensor:
    """:func:`quantize` outside of PyTorch's dispatcher; shares the memory of ``global_scale``."""
    rounding.check_weight(weight, name)
    shape = (weight.shape[0], weight.shape[1])
    kernels = backends.choose("quantize", weight, shape, scheme)
    if kernels is None:
        return rounding.quantize_tensor(weight, scheme, seed=seed, name=name, global_scale=global_scale)
    weight, global_scale = rounding.checked(weight, scheme, name, global_scale)
    made = kernels.quantize(weight, scheme, derive_key(seed, name), global_scale)
    if made is None:
        raise rounding.first_non_finite(weight, name)
    return QTensor(made[0], made[1], global_scale, shape, scheme)


def _quantize(weight, scheme, seed, name, global_scale):  # type: ignore[no-untyped-def]
    q = quantize_tensor(weight, QuantScheme.parse(scheme), seed=seed, name=name, global_scale=global_scale)
    made = q.global_scale
    return q.packed, q.scale, made if made is None or global_scale is None else made.clone()


def _quantize_fake(weight, scheme, seed, name, global_scale):  # type: ignore[no-untyped-def]
    s = QuantScheme.parse(scheme)
    packed = weight.new_empty(s.packed_shape(weight.shape), dtype=torch.uint8)
    scale = weight.new_empty(s.scale_shape(weight.shape), dtype=scale_dtype(s.scale_format))
    return packed, scale, weight.new_empty(1, dtype=torch.float32) if s.global_scale else None


def _quantize_activations(x, scheme, per_token):  # type: ignore[no-untyped-def]
    return quantize_dynamically(x, QuantScheme.parse(scheme), per_token, _round_trip)


def _round_trip(tokens: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    q = quantize_tensor(tokens, scheme, name="activations")
    return _dense(q.packed, q.scale, q.global_scale, q.shape, q.scheme, tokens.dtype)


def _quantize_activations_fake(x, scheme, per_token):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _dequantize(packed, scale, global_scale, shape, scheme, dtype):  # type: ignore[no-untyped-def]
    s, shape = QuantScheme.parse(scheme), tuple(shape)
    check_parts(packed, scale, global_scale, shape, s)
    return _dense(packed, scale, global_scale, shape, s, dtype)


def _dense(packed, scale, global_scale, shape, scheme, dtype):  # type: ignore[no-untyped-def]
    kernels = backends.choose("dequantize", packed, shape, scheme, dtype=dtype)
    if kernels is not None:
        return kernels.dequantize(packed, scale, global_scale, shape, scheme, dtype)
    return dequantize_parts(packed, scale, global_scale, shape, scheme, dtype)


def _dequantize_fake(packed, scale, global_scale, shape, scheme, dtype):  # type: ignore[no-untyped-def]
    check_parts(packed, scale, global_scale, tuple(shape), QuantScheme.parse(scheme))
    return packed.new_empty(shape, dtype=dtype)


def _linear(x, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    s, shape = QuantScheme.parse(scheme), tuple(shape)
    _check_linear(x, packed, scale, global_scale, bias, shape, s)
    kernels = backends.choose("linear", x, shape, s)
    if kernels is not None:
        return kernels.linear(x, packed, scale, global_scale, bias, shape, s)
    # A bias more precise than the activations stays so until the result is rounded.
    exact = exact_in(x.dtype, s) and (bias is None or bias.dtype == x.dtype)
    dtype = x.dtype if exact else torch.float32
    weight = _dense(packed, scale, global_scale, shape, s, dtype)
    y = F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))
    return y.to(x.dtype)


def _quantized_linear(x, packed, scale, global_scale, bias, shape, scheme, activations, per_token):  # type: ignore[no-untyped-def]
    s, a, shape = QuantScheme.parse(scheme), QuantScheme.parse(activations), tuple(shape)
    _check_linear(x, packed, scale, global_scale, bias, shape, s)
    kernels = backends.choose("quantized_linear", x, shape, s, activations=a, per_token=per_token)
    if kernels is not None:
        return kernels.quantized_linear(x, packed, scale, global_scale, bias, shape, s, a)
    return _linear(_quantize_activations(x, activations, per_token), packed, scale, global_scale, bias, shape, scheme)


def _quantized_linear_fake(x, packed, scale, global_scale, bias, shape, scheme, activations, per_token):  # type: ignore[no-untyped-def]
    return _linear_fake(x, packed, scale, global_scale, bias, shape, scheme)


def _linear_fake(x, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    _check_linear(x, packed, scale, global_scale, bias, shape, QuantScheme.parse(scheme))
    return x.new_empty([*x.shape[:-1], shape[0]])


def _check_linear(x, packed, scale, global_scale, bias, shape, scheme):  # type: ignore[no-untyped-def]
    check_parts(packed, scale, global_scale, tuple(shape), scheme)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"activations must be fp32, bf16 or fp16, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != shape[1]:
        raise ValueError(f"activations {list(x.shape)} do not fit a weight of {shape[1]} input features")
    if x.device != packed.device:
        raise ValueError(f"activations are on {x.device}, the weight on {packed.device}; move them to one device")
    if bias is not None:
        if tuple(bias.shape) != (shape[0],):
            raise ValueError(f"bias must be [{shape[0]}], not {list(bias.shape)}")
        if bias.device != packed.device:
            raise ValueError(f"bias is on {bias.device}, the weight on {packed.device}; move them to one device")


def _linear_grad(grad, packed, scale, global_scale, shape, scheme):  # type: ignore[no-untyped-def]
    s = QuantScheme.parse(scheme)
    _check_grad(grad, packed, scale, global_scale, shape, s)
    kernels = backends.choose("linear_grad", grad, tuple(shape), s)
    if kernels is not None:
        return kernels.linear_grad(grad, packed, scale, global_scale, tuple(shape), s)
    dtype = grad.dtype if exact_in(grad.dtype, s) else torch.float32
    weight = _dense(packed, scale, global_scale, tuple(shape), s, dtype)
    return (grad.to(dtype) @ weight).to(grad.dtype)


def _linear_grad_fake(grad, packed, scale, global_scale, shape, scheme):  # type: ignore[no-untyped-def]
    _check_grad(grad, packed, scale, global_scale, shape, QuantScheme.parse(scheme))
    return grad.new_empty([*grad.shape[:-1], shape[1]])


def _check_grad(grad, packed, scale, global_scale, shape, scheme):  # type: ignore[no-untyped-def]
    check_parts(packed, scale, global_scale, tuple(shape), scheme)
    if grad.shape[-1] != shape[0] or grad.device != packed.device:
        raise ValueError(f"gradient {list(grad.shape)} on {grad.device} does not fit a weight {list(shape)}")


def _linear_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, packed, scale, global_scale, bias, shape, scheme, *activations = inputs
    ctx.more = len(activations)
    ctx.save_for_backward(packed, scale, global_scale)
    ctx.weight, ctx.bias_dtype = (shape, scheme), None if bias is None else bias.dtype


def _linear_backward(ctx, grad):  # type: ignore[no-untyped-def]
    packed, scale, global_scale = ctx.saved_tensors
    shape, spec = ctx.weight
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.mxquant.linear_grad(grad, packed, scale, global_scale, shape, spec)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, shape[0]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, *[None] * ctx.more


for _name, _function, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("dequantize", _dequantize, _dequantize_fake),
    ("linear", _linear, _linear_fake),
    ("linear_grad", _linear_grad, _linear_grad_fake),
    ("quantized_linear", _quantized_linear, _quantized_linear_fake),
    ("quantize_activations", _quantize_activations, _quantize_activations_fake),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxquant::{_name}", _fake, lib=_LIBRARY)
for _name in ("linear", "quantized_linear"):
    torch.library.register_autograd(f"mxquant::{_name}", _linear_backward, setup_context=_linear_setup, lib=_LIBRARY)
torch.library.register_autograd("mxquant::quantize_activations", lambda ctx, grad: (grad, None, None), lib=_LIBRARY)
