"""``QuantExperts``: the experts of a mixture, their matrices packed.

transformers' class of the experts stays the base: its gate, activation, biases and whatever else it
holds are used as they are. Only its matrices, and the way they are multiplied, are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxquant.checkpoint.formats.native import ModuleEntry
from mxquant.codec.numerics import scale_dtype
from mxquant.codec.qtensor import QTensor
from mxquant.nn.quant_linear import restore_encodings
from mxquant.ops.grouped import grouped_linear
from mxquant.ops.operators import dequantize, quantize_activations
from mxquant.schemes.activations import ActivationScheme
from mxquant.transformers.mixtures import matrices, takes_all_tokens


def pack_experts(module: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Make experts of transformers :class:`QuantExperts`, their ``entries`` (by parameter) to be filled.

    Buffers carry the parameter's name: ``gate_up_proj`` (uint8, ``entry.stored_shape``),
    ``gate_up_proj_scale`` and, where the scheme has one, ``gate_up_proj_global_scale`` (fp32
    ``[experts]``). They are on the parameter's device, uninitialized.
    """
    layouts = matrices(module)
    base = QuantLlama4Experts if takes_all_tokens(module) else QuantExperts
    for name, entry in entries.items():
        device = getattr(module, name).device
        delattr(module, name)
        kind = scale_dtype(entry.scheme.scale_format)
        packed = torch.empty(entry.stored_shape, dtype=torch.uint8, device=device)
        scale, divisors = torch.empty(entry.scale_shape, dtype=kind, device=device), None
        if entry.scheme.global_scale:
            divisors = torch.empty(entry.global_scale_shape, dtype=torch.float32, device=device)
        for suffix, buffer in (("", packed), ("_scale", scale), ("_global_scale", divisors)):
            module.register_buffer(f"{name}{suffix}", buffer)
            if buffer is not None:  # transformers would fill what stays offloaded with random numbers
                buffer._is_hf_initialized = True  # type: ignore[attr-defined]
    experts: Any = module
    experts.__class__ = _subclass(base, experts.__class__)
    experts.entries, experts.layouts = dict(entries), layouts


def unpack_experts(module: QuantExperts, dtype: torch.dtype) -> None:
    """Undo :func:`pack_experts`: dense parameters, in the class of transformers."""
    experts: Any = module
    for name in list(experts.entries):
        dense = experts.dequantize(name, dtype)
        for part in (name, f"{name}_scale", f"{name}_global_scale"):
            del experts._buffers[part]
        experts.register_parameter(name, nn.Parameter(dense))
    del experts.entries, experts.layouts
    experts.__class__ = type(module).__bases__[1]


class QuantExperts(nn.Module):
    """Experts whose matrices stay packed; made by :func:`pack_experts`, never by itself.

    ``entries``: format of each packed parameter, ``(out_features, in_features)`` of one expert's
    matrix in it. ``layouts``: the parameters that hold matrices, and whether the dense ones lie
    ``[experts, in, out]``. One that is not among the entries is dense.
    """

    num_experts: int
    has_gate: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]
    entries: dict[str, ModuleEntry]
    layouts: dict[str, bool]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, hidden]`` through each token's experts, ``[tokens, k]``, summed by their weights."""
        up, down = self.layouts
        chosen, weights = top_k_index.reshape(-1), top_k_weights.reshape(-1, 1)
        # Numbers beyond the last expert stand for none.
        present = (chosen < self.num_experts)[:, None]
        experts, order = torch.sort(chosen.clamp(max=self.num_experts - 1), stable=True)
        ends = _ends(experts, self.num_experts)
        x = self._quantize(hidden_states, up)[order // top_k_index.shape[-1]]
        x = self._multiply(x, ends, up)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = self._multiply(self._quantize(x, down, ends), ends, down)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)  # type: ignore[operator]
        x = torch.empty_like(x).index_copy(0, order, x)  # back in the order of tokens
        x = torch.where(present, x * weights, 0)
        return x.view(*top_k_index.shape, x.shape[-1]).sum(-2).to(hidden_states.dtype)

    def qtensors(self, name: str) -> list[QTensor]:
        """The matrices of a packed parameter, one an expert, as views of its buffers. Raises ``ValueError``
        if a buffer is not what the entry says."""
        entry = self.entries[name]
        scale, divisors = self._buffers[f"{name}_scale"], self._buffers[f"{name}_global_scale"]
        assert scale is not None
        if tuple(scale.shape) != entry.scale_shape:
            raise ValueError(f"scales of {name} must be {list(entry.scale_shape)}, not {list(scale.shape)}")
        parts = zip(
            self._packed(name), scale, [None] * len(scale) if divisors is None else divisors.split(1), strict=True
        )
        return [QTensor(*part, entry.shape, entry.scheme) for part in parts]

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense parameter, in the layout that the model has it in."""
        dense = torch.stack([dequantize(q, dtype) for q in self.qtensors(name)])
        return dense.transpose(1, 2).contiguous() if self.layouts[name] else dense

    def extra_repr(self) -> str:
        lines = [super().extra_repr()]
        for name, entry in self.entries.items():
            activations = f", activations={entry.activations.text}" if entry.activations else ""
            lines.append(
                f"{name}: experts={entry.experts}, shape={entry.shape}, scheme={entry.scheme.text}{activations}"
            )
        return "\n".join(line for line in lines if line)

    def _multiply(self, x: torch.Tensor, ends: torch.Tensor, name: str) -> torch.Tensor:
        """Rows sorted by expert times the matrices of parameter ``name``."""
        bias = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else None
        entry = self.entries.get(name)
        if entry is None:
            return self._multiply_dense(x, ends, name, bias)
        scale, divisors = self._buffers[f"{name}_scale"], self._buffers[f"{name}_global_scale"]
        assert scale is not None
        columns = entry.shape[1]
        return grouped_linear(x, ends, self._packed(name), scale, divisors, entry.scheme, columns=columns, bias=bias)

    def _multiply_dense(
        self, x: torch.Tensor, ends: torch.Tensor, name: str, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = getattr(self, name)
        made = []
        for expert, rows in _spans(x, ends):
            matrix = weight[expert].t() if self.layouts[name] else weight[expert]
            made.append(F.linear(rows, matrix, None if bias is None else bias[expert]))
        return torch.cat(made)

    def _packed(self, name: str) -> torch.Tensor:
        packed = self._buffers[name]
        assert packed is not None
        return packed if packed.ndim == 3 else packed.view(self.entries[name].packed_shape)

    def _quantize(self, x: torch.Tensor, name: str, ends: torch.Tensor | None = None) -> torch.Tensor:
        """The input of parameter ``name`` in the format that its entry wants; ``ends``: of each expert's rows."""
        entry = self.entries.get(name)
        scheme = entry.activations if entry else None
        if scheme is None:
            return x
        if ends is None or not _sees_all_rows(scheme):
            return quantize_activations(x, scheme)
        # Each expert's rows are a tensor of their own, and so have a global scale of their own.
        return torch.cat([quantize_activations(rows, scheme) for _, rows in _spans(x, ends)])

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        names = {f"{name}{part}" for name in self.entries for part in ("", "_scale", "_global_scale")}
        before = {name: self._buffers[name] for name in names}
        super()._apply(fn, recurse)
        restore_encodings(self, before)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so it is pickled as the two that it is made of.
        base, dense = type(self).__bases__
        return _blank, (base, dense), self.__dict__


class QuantLlama4Experts(QuantExperts):
    """Llama 4's, which are given ``[experts x tokens, hidden]``: all tokens for each expert, zeros where not meant."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        up, down = self.layouts
        x = self._quantize(hidden_states, up)
        rows = None
        if not torch.compiler.is_compiling():  # what is zero stays so, and need not be multiplied
            chosen = hidden_states.any(-1)
            rows = chosen.nonzero().squeeze(-1)
            ends = chosen.view(self.num_experts, -1).sum(1).cumsum(0).to(torch.int32)
            x = x[rows]
        else:
            step = len(hidden_states) // self.num_experts
            ends = torch.arange(1, self.num_experts + 1, device=x.device, dtype=torch.int32) * step
        gate, up_states = self._multiply(x, ends, up).chunk(2, dim=-1)
        x = up_states * self.act_fn(gate)
        x = self._multiply(self._quantize(x, down, ends), ends, down)
        return x if rows is None else torch.zeros_like(hidden_states).index_copy(0, rows, x)


def _ends(experts: torch.Tensor, count: int) -> torch.Tensor:
    """The row after the last one of each expert, int32 ``[count]``, of sorted expert numbers."""
    numbers = torch.arange(count, device=experts.device, dtype=experts.dtype)
    return torch.searchsorted(experts, numbers, right=True).to(torch.int32)


def _spans(x: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each expert and its rows of ``x``."""
    start = 0
    for expert, stop in enumerate(ends.tolist()):
        yield expert, x[start:stop]
        start = stop


def _sees_all_rows(scheme: ActivationScheme) -> bool:
    return scheme.scheme.global_scale and not scheme.per_token


@functools.cache
def _subclass(base: Any, dense: Any) -> Any:
    return type(f"Quant{dense.__name__}", (base, dense), {"__module__": __name__})


def _blank(base: Any, dense: Any) -> Any:
    cls = _subclass(base, dense)
    return cls.__new__(cls)
