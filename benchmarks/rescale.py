"""The same model with narrower (or wider) weights: its function stays, the size of its weights moves.

Real models whose weights are narrow enough to meet the low end of a scale format have billions of
parameters. Any Llama-like model can be made as narrow. Everything between two matrix products that
is linear lets a factor pass from one to the other:

==============================  ==============================================================
``y`` = 1 / input norm          norm weight times ``1/y``, columns of q, k and v times ``y``
``m`` = 1 / post-attention norm norm weight times ``1/m``, columns of gate and up times ``m``
``a``, one a KV head            rows of q times ``a``, of k by ``1/a``: rotary embedding is linear
``b``, one a KV head            rows of v times ``b``, columns of o by ``1/b``
``u``                           rows of up times ``u``, columns of down by ``1/u``
``s``, one a model              the residual stream: embedding, rows of o and down times ``s``; the
                                norms' epsilon times ``s^2``, so that their outputs stay what they
                                were; with a tied head the final norm times ``1/s``
==============================  ==============================================================

None of it touches gate's output, which an activation function reads. With powers of two every
intermediate number keeps its significant bits, so the logits stay the same bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxquant.errors import MXQuantError

# Decoder layers of these are Llama's: RMSNorm that multiplies by its weight, rotary or no position
# embedding, gated MLP, nothing else that is not linear. Granite's multipliers are linear.
MODEL_TYPES = ("llama", "mistral", "qwen2", "granite", "smollm3")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Moved:
    """One projection's standard deviation before and after."""

    name: str
    before: float
    after: float


@dataclass
class _Factors:
    """Base-2 logarithms of one layer's factors; the names are those of the module docstring."""

    y: torch.Tensor
    m: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    u: torch.Tensor


def rescale(model: Any, *, factor: float | None = None, sigma: float | None = None, exact: bool = True) -> list[Moved]:
    """Make the linear weights of a Llama-like transformers model narrower or wider, in place.

    Parameters
    ----------
    model : a causal LM of one of ``MODEL_TYPES``, dense, in fp32 or bf16 (fp16 while nothing underflows).
    factor : multiplies the standard deviation of every projection, e.g. ``2**-6``.
    sigma : in place of ``factor``, the standard deviation that every projection should have. There
        are fewer factors than projections, so this is a least-squares fit of the logarithms.
    exact : use powers of two only; then logits stay bit-identical, and ``sigma`` is met within
        about a factor of two. False follows real numbers, and the function stays the same up to
        rounding in the model's dtype.

    Returns the standard deviation of each projection before and after. ``model.save_pretrained``
    saves the result like any other model. Raises ``MXQuantError``, before anything is changed, for
    models that are not known to keep their function, and for factors that lose bits although
    ``exact`` forbids it.
    """
    if (factor is None) == (sigma is None):
        raise MXQuantError("give either a factor or the sigma to reach")
    goal = factor if sigma is None else sigma
    if not goal or not 0 < goal < math.inf:
        raise MXQuantError(f"the {'factor' if sigma is None else 'sigma'} must be a positive number, not {goal}")
    if factor is not None and exact and math.frexp(factor)[0] != 0.5:
        raise MXQuantError(f"factor {factor} is no power of two, so logits would change in rounding; use exact=False")
    layers = _check_model(model)
    with torch.no_grad():
        before = [_sigmas(layer) for layer in layers]
        stream, factors = _solve(model, layers, factor, sigma, exact)
        scaled = _Scaled(exact)
        _scale_stream(model, layers, stream, scaled)
        for layer, f in zip(layers, factors, strict=True):
            _scale_layer(layer, f, scaled)
        scaled.commit()
        model.config.rms_norm_eps *= 4**stream
        for norm in _norms(model, layers):
            norm.variance_epsilon *= 4**stream
        after = [_sigmas(layer) for layer in layers]
    return [
        Moved(f"layers.{i}.{name}_proj", before[i][name], after[i][name])
        for i in range(len(layers))
        for name in PROJECTIONS
    ]


def projections(layer: Any) -> dict[str, nn.Linear]:
    """The seven linear layers of a Llama-like decoder layer, by their names in ``PROJECTIONS``."""
    attention = {name: getattr(layer.self_attn, f"{name}_proj") for name in ("q", "k", "v", "o")}
    return attention | {name: getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}


class _Scaled:
    """New values of parameters, all computed and checked before the first is put in its place."""

    def __init__(self, exact: bool):
        self._exact = exact
        self._new: dict[torch.Tensor, torch.Tensor] = {}

    def multiply(self, parameter: torch.Tensor | None, log2: float | torch.Tensor) -> None:
        """Multiply by ``2**log2``, which broadcasts; None stands for a bias that is not there."""
        if parameter is None:
            return
        old = self._new.get(parameter, parameter.data)
        power = torch.exp2(torch.as_tensor(log2, dtype=torch.float64, device=old.device))
        new = (old.double() * power).to(old.dtype)
        if self._exact and not torch.equal(new.double(), old.double() * power):
            raise MXQuantError(
                f"weights in {str(old.dtype).removeprefix('torch.')} would lose bits at this size; "
                "convert the model to bfloat16 or float32 first, or choose a factor nearer to 1"
            )
        self._new[parameter] = new

    def commit(self) -> None:
        for parameter, value in self._new.items():
            parameter.data = value


def _check_model(model: Any) -> list[Any]:
    """The decoder layers of a model that is known to keep its function."""
    kind = getattr(model.config, "model_type", type(model).__name__)
    known = ", ".join(MODEL_TYPES)
    if kind not in MODEL_TYPES:
        raise MXQuantError(f"cannot rescale a model of type {kind!r} without changing its function; known are {known}")
    layers = list(model.model.layers)
    for number, layer in enumerate(layers):
        if hasattr(layer.self_attn, "q_norm") or hasattr(layer.self_attn, "k_norm"):
            raise MXQuantError(f"cannot rescale {kind}: layer {number} normalizes its queries and keys")
        for name, projection in projections(layer).items():
            if type(projection) is not nn.Linear:
                what = type(projection).__name__
                raise MXQuantError(f"cannot rescale layers.{number}.{name}_proj, a {what}; start from the dense model")
    return layers


def _norms(model: Any, layers: list[Any]) -> Iterable[Any]:
    for layer in layers:
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
    yield model.model.norm


def _sigmas(layer: Any) -> dict[str, float]:
    return {name: float(linear.weight.float().std()) for name, linear in projections(layer).items()}


def _solve(
    model: Any, layers: list[Any], factor: float | None, sigma: float | None, exact: bool
) -> tuple[float, list[_Factors]]:
    """Logarithms of ``s`` and of each layer's factors."""
    wanted = [_wanted(model, layer, factor, sigma) for layer in layers]
    # What the other factors cannot mend of a layer's attention and MLP, and the weight that least
    # squares give to either once those factors are at their best: 2/5 and 1/3.
    attention = torch.stack([(w["v"] + w["o"]).mean() - (w["q"] + w["k"]).mean() / 2 for w in wanted]).mean()
    mlp = torch.stack([w["up"] + w["down"] - w["gate"] for w in wanted]).mean()
    stream = _maybe_round((6 * attention + 5 * mlp) / 11, exact)
    return float(stream), [_solve_layer(w, stream, exact) for w in wanted]


def _wanted(model: Any, layer: Any, factor: float | None, sigma: float | None) -> dict[str, torch.Tensor]:
    """By how many binades each projection should move: fp64, ``[kv_heads]`` in attention, else 0-dim."""
    heads = model.config.num_key_value_heads
    found = {}
    for name, linear in projections(layer).items():
        weight = linear.weight.float()
        if name in ("q", "k", "v"):
            parts = weight.view(heads, -1)
        elif name == "o":
            parts = weight.t().reshape(heads, -1)
        else:
            parts = weight.view(1, -1)
        if sigma is not None:
            have = parts.std(1).double().cpu()
            # Zeros stay zero whatever multiplies them.
            moved = torch.where(have > 0, math.log2(sigma) - have.clamp(min=1e-300).log2(), 0.0)
        else:
            assert factor is not None
            moved = torch.full((len(parts),), math.log2(factor), dtype=torch.float64)
        found[name] = moved if name in ("q", "k", "v", "o") else moved[0]
    return found


def _solve_layer(w: dict[str, torch.Tensor], s: torch.Tensor, exact: bool) -> _Factors:
    """Least squares of the seven residuals.

    Attention: q moves by ``y + a``, k by ``y - a``, v by ``y + b``, o by ``s - b``. The MLP: gate
    moves by ``m``, up by ``m + u``, down by ``s - u``. Whatever y and m, the best a, b and u split
    what is left evenly between two projections; what they leave is quadratic in y and in m.
    """
    qk, vo = (w["q"] + w["k"]).mean() / 2, (w["v"] + w["o"]).mean()
    y = _maybe_round((4 * qk + vo - s) / 5, exact)
    m = _maybe_round((2 * w["gate"] + w["up"] + w["down"] - s) / 3, exact)
    return _Factors(
        y,
        m,
        a=_maybe_round((w["q"] - w["k"]) / 2, exact),
        b=_maybe_round((w["v"] - y + s - w["o"]) / 2, exact),
        u=_maybe_round((w["up"] - m + s - w["down"]) / 2, exact),
    )


def _maybe_round(log2: torch.Tensor, exact: bool) -> torch.Tensor:
    return torch.round(log2) if exact else log2


def _scale_stream(model: Any, layers: list[Any], s: float, scaled: _Scaled) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scaled.multiply(embedding.weight, s)
    if head is not None and head.weight is embedding.weight:
        scaled.multiply(model.model.norm.weight, -s)
    for layer in layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            scaled.multiply(linear.weight, s)
            scaled.multiply(linear.bias, s)


def _scale_layer(layer: Any, f: _Factors, scaled: _Scaled) -> None:
    linear = projections(layer)
    scaled.multiply(layer.input_layernorm.weight, -f.y)
    scaled.multiply(layer.post_attention_layernorm.weight, -f.m)
    for name in ("q", "k", "v"):
        scaled.multiply(linear[name].weight, f.y)
    for name in ("gate", "up"):
        scaled.multiply(linear[name].weight, f.m)
    for name, log2 in (("q", f.a), ("k", -f.a), ("v", f.b), ("up", f.u)):
        rows = _spread(log2, linear[name].out_features)
        scaled.multiply(linear[name].weight, rows[:, None])
        scaled.multiply(linear[name].bias, rows)
    scaled.multiply(linear["o"].weight, -_spread(f.b, linear["o"].in_features))
    scaled.multiply(linear["down"].weight, -_spread(f.u, linear["down"].in_features))


def _spread(log2: torch.Tensor, features: int) -> torch.Tensor:
    """One number a KV head (or one for all) -> one a feature; heads that share a KV head are neighbours."""
    return log2.reshape(-1).repeat_interleave(features // log2.numel())
