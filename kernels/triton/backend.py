"""The Triton kernels as operators, and the rules of what they serve.

``why_not`` answers None where a kernel serves the call, else the rule in one sentence; then the
PyTorch reference runs. Triton and the kernels are imported at the first call, not with this module.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

from mxquant.kernels.backend import Backend, Operation
from mxquant.kernels.triton.names import E8M0_RULES, MANTISSA_RULES
from mxquant.schemes.formats import QuantScheme

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("e8m0", "e4m3", "ue5m3", "ue5m3-61440")
_OLDEST = (8, 0)
# Formats that tensor cores multiply by themselves, and the chips that do.
NATIVE: dict[tuple[str, str, int | tuple[int, int]], tuple[str, ...]] = {
    ("fp4_e2m1", "e8m0", 32): ("sm_100", "sm_103", "sm_120", "gfx950"),
    ("fp4_e2m1", "e4m3", 16): ("sm_100", "sm_103", "sm_120"),
}
_TILES = (1, 2, 4, 8, 16, 32, 64, 128)


def key(scheme: QuantScheme) -> tuple[str, str, int | tuple[int, int]]:
    """What NATIVE is looked up by."""
    return scheme.element, scheme.scale, scheme.block


class TritonBackend(Backend):
    """The Triton kernels; see the module's docstring for when they are imported."""

    name = "triton"

    def unavailable(self) -> str | None:
        """Why there are no Triton kernels in this environment; None if there are."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        return None

    def why_not(
        self,
        operation: Operation,
        x: torch.Tensor,
        shape: tuple[int, int],
        scheme: QuantScheme,
        *,
        dtype: torch.dtype | None = None,
        activations: QuantScheme | None = None,
        per_token: bool = False,
    ) -> str | None:
        match operation:
            case "quantize":
                return _why_not_quantize(x, scheme)
            case "dequantize":
                return _why_not_dequantize(x, scheme, dtype)
            case "linear" | "linear_grad" | "grouped_linear":
                return _why_not_linear(x, scheme)
            case "quantized_linear":
                assert activations is not None
                return _why_not_quantized_linear(x, shape, scheme, activations, per_token)
        return "the Triton kernels quantize whole weights, without statistics"

    def describe(self, operation: Operation, x: torch.Tensor | None = None, scheme: QuantScheme | None = None) -> str:
        if operation == "quantized_linear":
            return "tensor cores' block-scaled product of FP4 and FP4"
        if operation != "linear" or x is None or scheme is None:
            return f"{operation} kernel"
        rows = x.numel() // x.shape[-1]
        kernel = "GEMV, fp32 arithmetic" if rows == 1 else "split-K tensor-core product" if rows <= 16 else "tiled GEMM"
        c = scheme.block_shape[1]
        return kernel + ("" if c & (c - 1) == 0 else f"; one scale is read a byte, as {c} is no power of two")

    def dequantize(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        from mxquant.kernels.triton.dequantize import plan

        out = torch.empty(shape, dtype=dtype, device=packed.device)
        if out.numel():
            plan(packed.contiguous(), scale.contiguous(), global_scale, out, scheme).run()
        return out

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> torch.Tensor:
        from mxquant.kernels.triton.linear import plan
        from mxquant.kernels.triton.tuning import choose

        rows, out = _rows(x, shape[1]), x.new_empty(*x.shape[:-1], shape[0])
        if out.numel():
            parts = (rows, packed.contiguous(), scale.contiguous(), global_scale, bias, out.view(-1, shape[0]), scheme)
            for launch in plan(*parts, choose(*parts)):
                launch.run()
        return out

    def quantized_linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
        activations: QuantScheme,
    ) -> torch.Tensor:
        """One pass quantizes the activations, another multiplies, without a wait for the device.

        A token that is not finite gives NaN.
        """
        from mxquant.codec.rounding import tensor_amax
        from mxquant.codec.scaling import global_scale_for
        from mxquant.kernels.triton import native
        from mxquant.kernels.triton.quantize import plan

        rows = x.reshape(-1, shape[1])
        out = x.new_empty(*x.shape[:-1], shape[0])
        if not out.numel():
            return out
        finite = rows.isfinite().all(1, keepdim=True)
        rows = torch.where(finite, rows, 0).contiguous()
        size = (rows.shape[0], rows.shape[1])
        x_packed = torch.empty(activations.packed_shape(size), dtype=torch.uint8, device=x.device)
        x_scale = torch.empty(activations.scale_shape(size), dtype=torch.uint8, device=x.device)
        x_global = global_scale_for(tensor_amax(rows), activations) if activations.global_scale else None
        bad = torch.zeros(1, dtype=torch.int32, device=x.device)
        plan(rows, x_packed, x_scale, x_global, bad, activations, 0).run()
        weight = (packed.contiguous(), scale.contiguous(), global_scale)
        native.plan((x_packed, x_scale, x_global), weight, bias, out.view(-1, shape[0]), scheme).run()
        if activations.global_scale:
            finite = finite & finite.all()
        return torch.where(finite.view(*x.shape[:-1], 1), out, torch.nan)

    def grouped_linear(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> torch.Tensor:
        """The products of a mixture's experts in one launch; served where ``linear`` is."""
        from mxquant.kernels.triton.grouped import plan

        rows, out = _rows(x, x.shape[1]), x.new_empty(x.shape[0], packed.shape[1])
        if out.numel():
            bias = None if bias is None else bias.contiguous()
            plan(
                rows, ends.contiguous(), packed.contiguous(), scale.contiguous(), global_scale, bias, out, scheme
            ).run()
        return out

    def linear_grad(
        self,
        grad: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        shape: tuple[int, int],
        scheme: QuantScheme,
    ) -> torch.Tensor:
        from mxquant.kernels.triton.gradient import plan

        rows, out = _rows(grad, shape[0]), grad.new_empty(*grad.shape[:-1], shape[1])
        if out.numel():
            parts = (rows, packed.contiguous(), scale.contiguous(), global_scale)
            plan(*parts, out.view(-1, shape[1]), scheme).run()
        return out

    def quantize(
        self, weight: torch.Tensor, scheme: QuantScheme, key: int, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Packed elements and stored scales; None if something is not finite.

        That is one number read back from the device, which a CUDA graph cannot do: while one is captured
        nothing is checked.
        """
        from mxquant.codec.numerics import scale_dtype
        from mxquant.kernels.triton.quantize import plan

        shape = (weight.shape[0], weight.shape[1])
        packed = torch.empty(scheme.packed_shape(shape), dtype=torch.uint8, device=weight.device)
        scale = torch.empty(scheme.scale_shape(shape), dtype=torch.uint8, device=weight.device)
        bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
        plan(weight, packed, scale, global_scale, bad, scheme, key).run()
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and bool(bad):
            return None
        return packed, scale.view(scale_dtype(scheme.scale_format))


def _why_not_dequantize(packed: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype | None) -> str | None:
    if dtype not in _DTYPES:
        return f"the Triton kernels write fp32, bf16 and fp16, not {dtype}"
    return _why_not_scheme(scheme) or _why_not_device(packed.device)


def _why_not_linear(x: torch.Tensor, scheme: QuantScheme) -> str | None:
    if x.dtype not in _DTYPES:
        return f"the Triton kernels take fp32, bf16 and fp16 activations, not {x.dtype}"
    return _why_not_scheme(scheme) or _why_not_device(x.device)


def _why_not_quantized_linear(
    x: torch.Tensor, shape: tuple[int, int], scheme: QuantScheme, activations: QuantScheme, per_token: bool
) -> str | None:
    """Rules of the product of FP4 with FP4 in the tensor cores' own block-scaled arithmetic."""
    if per_token:
        return "tensor cores know no global scale for each row"
    found = NATIVE.get(key(scheme))
    if found is None or key(activations) != key(scheme):
        return f"tensor cores multiply MXFP4 with MXFP4 and NVFP4 with NVFP4, not {activations.text} with {scheme.text}"
    if x.device.type == "cuda" and _architecture(x.device) not in found:
        return f"{_architecture(x.device)} has no block-scaled product of {scheme.scale} scales"
    return _why_not_linear(x, scheme) or _why_not_quantize(x.reshape(-1, shape[1]).contiguous(), activations)


def _why_not_quantize(weight: torch.Tensor, scheme: QuantScheme) -> str | None:
    if not weight.is_contiguous():
        return "the Triton kernels quantize weights that are contiguous"
    r, c = scheme.block_shape
    if r not in _TILES or c not in _TILES or r * c < 8 or r * c > 4096:
        return "the Triton kernels quantize blocks whose sides are powers of two, of 8 to 4096 elements"
    known = E8M0_RULES if scheme.scale == "e8m0" else MANTISSA_RULES
    if scheme.scale_rule not in known:
        return f"the Triton kernels do not know the scale rule {scheme.scale_rule}"
    return _why_not_scheme(scheme) or _why_not_device(weight.device)


def _rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """``[..., columns]`` as a matrix with contiguous rows, copied only if it has none."""
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 or columns == 1 else rows.contiguous()


def _why_not_scheme(scheme: QuantScheme) -> str | None:
    if scheme.element != "fp4_e2m1":
        return f"the Triton kernels decode fp4_e2m1 elements, not {scheme.element}"
    if scheme.scale not in _SCALES:
        return f"the Triton kernels decode 8-bit scales, not {scheme.scale}"
    return None


def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None  # Triton's interpreter, or a question about shapes alone
    return _why_not_gpu(device.index if device.index is not None else torch.cuda.current_device())


def _architecture(device: torch.device) -> str:
    """``sm_90`` or ``gfx942``, of this CUDA or ROCm device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@lru_cache(maxsize=16)
def _why_not_gpu(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < _OLDEST:
        return f"the Triton kernels need compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None
