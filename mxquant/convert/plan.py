"""The plan of a quantization: every tensor's fate, and every problem that can be known beforehand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.formats import compressed_tensors, native, registry
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.headers import TensorInfo
from mxquant.checkpoint.layout import FLOAT_DTYPES, OutputTensor
from mxquant.checkpoint.reader import Checkpoint
from mxquant.checkpoint.writer import plan_shards
from mxquant.codec.qtensor import CHUNK_ELEMENTS
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import CheckpointError, PlanError
from mxquant.schemes.activations import NONE
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe, activations_text
from mxquant.transformers.architectures import KEPT, NameMapper, Parameter, build_meta_model, fused_group, inventory
from mxquant.transformers.classes import auto_class
from mxquant.transformers.mixtures import Layout, Piece, Place, layout, problems_of
from mxquant.transformers.parts import OUTSIDE, OUTSIDE_REASON, STATE_SPACE, needs_plain_weights

MAX_DENSE_SHARE = 0.05
# What stays dense unless named, as everybody expects.
KNOWN_KINDS = (
    "embedding",
    "output head",
    "norm",
    "bias",
    "convolution",
    "router",
    "buffer",
    "ignored",
    KEPT,
    STATE_SPACE,
    OUTSIDE,
    OUTSIDE_REASON,
)
# Kinds of parameters that are quantized unless a rule says otherwise.
_QUANTIZED = ("linear", "experts")
# fp32 working copies of one chunk that live at once, measured generously.
_CHUNK_COPIES = 16


@dataclass
class QuantPlan:
    """Everything :func:`mxquant.quantize_model` is going to do; see :func:`make_plan`.

    ``tied``: parameters without a tensor of their own, and the one that each shares.
    ``activations``, ``kv_cache``: what the output's config asks for when it runs, as text.
    ``auto_class``: the class of transformers that loads the output.
    ``held_bytes``: of the source's weights in memory, 0 where its files are mapped.
    """

    source: Path
    tensors: list[TensorPlan]
    on_disk: str
    on_disk_reason: str
    shards: list[list[OutputTensor]]
    quantization_config: dict[str, Any]
    bytes_before: int
    tied: dict[str, str] = field(default_factory=dict)
    activations: str = NONE
    kv_cache: str = NONE
    auto_class: str = "AutoModelForCausalLM"
    held_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[TensorPlan]:
        return [t for t in self.tensors if t.scheme]

    @property
    def dense(self) -> list[TensorPlan]:
        return [t for t in self.tensors if not t.scheme]

    @property
    def parameters(self) -> int:
        return sum(t.parameters for t in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(t.bytes_after for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight, scales and padding included."""
        count = sum(t.parameters for t in self.quantized)
        return 8 * sum(t.bytes_after for t in self.quantized) / count if count else 0.0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of anonymous memory for tensor data: what is held, and working copies of one row chunk."""
        widest = max((t.matrix[1] * t.scheme.block_shape[0] for t in self.quantized if t.scheme), default=0)
        return self.held_bytes + _CHUNK_COPIES * 4 * max(CHUNK_ELEMENTS, widest)

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "on_disk": self.on_disk,
            "on_disk_reason": self.on_disk_reason,
            "parameters": self.parameters,
            "quantized_parameters": sum(t.parameters for t in self.quantized),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
            "auto_class": self.auto_class,
            "activations": self.activations,
            "kv_cache": self.kv_cache,
            "predicted_peak_bytes": self.peak_bytes,
            "held_bytes": self.held_bytes,
            "shards": len(self.shards),
            "warnings": self.warnings,
            "tied": self.tied,
            "tensors": [t.to_dict() for t in self.tensors],
        }


def make_plan(
    checkpoint: Checkpoint,
    recipe: QuantRecipe,
    *,
    max_shard_bytes: int,
    allow_dense: bool = False,
    trust_remote_code: bool = False,
) -> QuantPlan:
    """Decide what happens to every tensor, from headers and the model class alone.

    Raises ``PlanError`` with *all* problems found: a quantized source, an unknown architecture,
    missing tensors, rules that match nothing, layers left dense by accident.
    """
    check_not_quantized(checkpoint)
    model = build_meta_model(checkpoint.folder, trust_remote_code=trust_remote_code)
    parameters = {p.name: p for p in inventory(model)}
    mapper = NameMapper(model)
    twice = _stored_twice(checkpoint, parameters, mapper)
    tensors, problems = _decide(checkpoint, recipe, parameters, mapper)
    tensors = [t for t in tensors if t.name not in twice]
    missing = list(mapper.missing(checkpoint.tensors, parameters.values()))
    if missing:
        problems.append(_lacks(checkpoint, missing, tensors, type(model).__name__))
    if not problems:
        problems += _check_coverage(tensors, recipe, allow_dense)
    if problems:
        raise PlanError(problems)
    on_disk, why = _choose_format([t for t in tensors if t.scheme], recipe, needs_plain_weights(model))
    for t in tensors:
        t.outputs = _outputs(t, on_disk)
    shards = plan_shards([t.outputs for t in tensors], max_shard_bytes)
    config = _quantization_config(tensors, on_disk, recipe, mapper)
    present = {mapper(name) for name in checkpoint.tensors if name not in twice}
    tied = {p.name: p.tied_to for p in parameters.values() if p.tied_to and p.name not in present}
    return QuantPlan(
        checkpoint.source,
        tensors,
        on_disk,
        why,
        shards,
        config,
        checkpoint.nbytes,
        tied,
        activations=activations_text(recipe.activations),
        kv_cache=activations_text(recipe.kv_cache),
        auto_class=auto_class(checkpoint.config).__name__,
        held_bytes=checkpoint.held_bytes,
    )


def _lacks(checkpoint: Checkpoint, missing: list[str], tensors: list[TensorPlan], model: str) -> str:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    other = next((f"; it holds {t.name}, which {model} does not know" for t in tensors if t.kind == "unknown"), "")
    return f"{checkpoint.folder} lacks {', '.join(missing[:3])}{more}, which {model} needs{other}"


def _stored_twice(checkpoint: Checkpoint, parameters: dict[str, Parameter], mapper: NameMapper) -> set[str]:
    """Tensors that the model ties to another one which the files hold as well, with the same bytes.

    They are written once. Layers with other bytes are layers of their own, in ``parameters`` too: the
    loader will not tie them.
    """
    names = {mapper(name): name for name in checkpoint.tensors}
    found = set()
    for target, name in names.items():
        parameter = parameters.get(target or "")
        twin = names.get(parameter.tied_to) if parameter and parameter.tied_to else None
        if parameter is None or twin is None:
            continue
        if checkpoint.tensors[name].shape == checkpoint.tensors[twin].shape:
            one, other = checkpoint.read(name), checkpoint.read(twin)
            if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                found.add(name)
                continue
        if parameter.kind == "linear":
            parameters[parameter.name] = replace(parameter, tied_to=None)
    return found


def check_not_quantized(checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError`` if the source is quantized already, unless it is read as a dense one."""
    method = registry.method_of(checkpoint.config, checkpoint.folder)
    if method and not checkpoint.decoded:
        way_out = registry.way_to_dense(checkpoint.folder)
        raise CheckpointError(
            f"{checkpoint.folder} is already quantized ({method}); start from the dense model{way_out}"
        )


def _decide(
    checkpoint: Checkpoint, recipe: QuantRecipe, parameters: dict[str, Parameter], mapper: NameMapper
) -> tuple[list[TensorPlan], list[str]]:
    tensors: list[TensorPlan] = []
    problems: list[str] = []
    misfits: list[str] = []
    for info in checkpoint.tensors.values():
        place = mapper.place(info.name)
        parameter = parameters.get(place.parameter) if place else None
        if place and parameter and parameter.kind == "experts":
            tensors.append(_experts_plan(info, place, parameter, recipe, problems))
            continue
        if place and place.is_whole and not parameter:
            tensors.append(TensorPlan(info.name, info.dtype, info.shape, "buffer", None, "buffer"))
            continue
        if place is None and mapper.ignores(info.name):
            tensors.append(TensorPlan(info.name, info.dtype, info.shape, "ignored", None, "ignored by the model class"))
            continue
        if not (place and parameter and place.is_whole):
            reason = "not a parameter of the model class, or only a part of one"
            tensors.append(TensorPlan(info.name, info.dtype, info.shape, "unknown", None, reason))
            continue
        stored = parameter.shape[::-1] if parameter.transposed else parameter.shape
        if info.shape != stored:
            misfits.append(f"{info.name}: {list(info.shape)} in the file, but the config says {list(stored)}")
            continue
        scheme, reason = _scheme_for(info.name, info.dtype, parameter, recipe, problems)
        group = fused_group(info.name.removesuffix(".weight")) if scheme and scheme.global_scale else None
        kind, transposed = parameter.kind, parameter.transposed
        tensors.append(TensorPlan(info.name, info.dtype, info.shape, kind, scheme, reason, transposed, group))
    if misfits:  # of a config that is another model's there are hundreds
        problems.append(misfits[0] + (f" (and {len(misfits) - 1} more like it)" if len(misfits) > 1 else ""))
    names = [t.module for t in tensors if t.name.endswith(".weight") or t.kind == "experts"]
    problems += [f"pattern {p!r} matches no module of the model" for p in recipe.unused_patterns(names)]
    return tensors, problems + _check_experts(tensors, parameters)


def _experts_plan(
    info: TensorInfo, place: Place, parameter: Parameter, recipe: QuantRecipe, problems: list[str]
) -> TensorPlan:
    """What becomes of a tensor with matrices of experts: of one, of all, or a part of all."""
    t = TensorPlan(info.name, info.dtype, info.shape, parameter.kind, None, "", place=place)
    found = layout(place, _three(parameter.shape), parameter.transposed, info.shape)
    if not isinstance(found, Layout):
        t.reason = found
        return t
    if info.shape != found.shape:
        problems.append(f"{info.name}: {list(info.shape)} in the file, but the config says {list(found.shape)}")
        return t
    decision = recipe.decide(t.module)
    t.scheme, t.reason = decision.scheme, decision.reason
    t.transposed, t.experts = found.transposed, found.experts
    if t.scheme and info.dtype not in FLOAT_DTYPES:
        problems.append(f"{t.name}: {t.dtype} weights cannot be quantized; need {', '.join(FLOAT_DTYPES)}")
    if t.scheme and t.scheme.global_scale and place.parts > 1:
        t.group = place.parameter if place.expert is None else f"{place.parameter}.{place.expert}"
    return t


def _check_experts(tensors: list[TensorPlan], parameters: dict[str, Parameter]) -> list[str]:
    """Problems with the tensors that make up parameters of experts."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for t in tensors:
        if t.place and t.place.obstacle is None and len(t.shape) >= 2:
            held = Layout(t.matrix, t.experts, t.transposed)
            pieces[t.place.parameter].append(Piece(t.name, t.place, held, t.scheme))
    problems: dict[str, list[str]] = defaultdict(list)
    for name, found in pieces.items():
        for problem in problems_of(name, parameters[name].shape[0], found):
            problems[native.with_wildcards(name)].append(problem)
    # Layers are mostly alike, and so are their problems.
    return [f"{p[0]}{f' (and {len(p) - 1} more like it)' if len(p) > 1 else ''}" for p in problems.values()]


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    experts, rows, columns = shape
    return experts, rows, columns


def _scheme_for(
    name: str, dtype: str, parameter: Parameter, recipe: QuantRecipe, problems: list[str]
) -> tuple[QuantScheme | None, str]:
    if not name.endswith(".weight"):
        return None, parameter.reason or parameter.kind
    decision = recipe.decide(name.removesuffix(".weight"))
    if not parameter.is_matrix_product:
        return None, parameter.reason or parameter.kind
    if not parameter.quantizable and not decision.named:
        return None, parameter.reason or parameter.kind
    if decision.scheme and dtype not in FLOAT_DTYPES:
        problems.append(f"{name}: {dtype} weights cannot be quantized; need {', '.join(FLOAT_DTYPES)}")
    return decision.scheme, decision.reason


def _check_coverage(tensors: list[TensorPlan], recipe: QuantRecipe, allow_dense: bool) -> list[str]:
    """Problems with what stays dense: nothing may be left out silently."""
    if not any(t.scheme for t in tensors):
        return ["nothing would be quantized: no linear layer is matched by the recipe"]
    matrices = [t for t in tensors if len(t.shape) >= 2 and t.kind not in KNOWN_KINDS]
    by_accident = [t for t in matrices if not t.scheme and not (t.kind in _QUANTIZED and recipe.decide(t.module).named)]
    total = sum(t.parameters for t in matrices)
    share = sum(t.parameters for t in by_accident) / total if total else 0.0
    if share > MAX_DENSE_SHARE and not allow_dense:
        largest = max(by_accident, key=lambda t: t.parameters)
        return [
            f"{share:.0%} of the weights in matrices would stay dense without a rule saying so, e.g. {largest.name} "
            f"({largest.reason}); exclude them, or pass --allow-dense"
        ]
    return []


def _choose_format(quantized: list[TensorPlan], recipe: QuantRecipe, obstacle: str | None) -> tuple[str, str]:
    """The on-disk format and the reason for it. ``obstacle``: what keeps others from reading packed weights."""
    if recipe.activations or recipe.kv_cache:
        what = "activations" if recipe.activations else "keys and values"
        return native.QUANT_METHOD, f"it says what {what} are rounded to as the model runs"
    names = {compressed_tensors.format_name(t.scheme) for t in quantized if t.scheme}
    if names == {None}:
        return native.QUANT_METHOD, "no other format holds this scheme"
    if len(names) > 1:
        return native.QUANT_METHOD, "several schemes in one model"
    stack = next((t for t in quantized if t.experts), None)
    if stack:
        return (
            native.QUANT_METHOD,
            f"{stack.name} holds the matrices of all experts, for which compressed-tensors has no name",
        )
    if any(t.kind == "experts" and t.scheme and t.scheme.global_scale for t in quantized):
        why = "transformers ignores the global scales of experts in compressed-tensors, so their weights would be wrong"
        return native.QUANT_METHOD, why
    if obstacle:
        return native.QUANT_METHOD, obstacle
    uneven = next((t for t in quantized if t.scheme and t.matrix[1] % t.scheme.block_shape[1]), None)
    if uneven:
        return native.QUANT_METHOD, f"{uneven.name} has {uneven.matrix[1]} input features, not a whole number of blocks"
    transposed = next((t for t in quantized if t.transposed), None)
    if transposed:
        return native.QUANT_METHOD, f"{transposed.name} is stored transposed, which compressed-tensors cannot say"
    return compressed_tensors.QUANT_METHOD, f"{names.pop()}: read by vLLM, SGLang and transformers without mxquant"


def _outputs(t: TensorPlan, on_disk: str) -> list[OutputTensor]:
    if t.scheme is None:
        return [OutputTensor(t.name, t.dtype, t.shape)]
    return list(_packed(t, t.scheme, on_disk).parts.values())


def _packed(t: TensorPlan, scheme: QuantScheme, on_disk: str, recipe: QuantRecipe | None = None) -> PackedWeight:
    activations = recipe.activations_for(scheme) if recipe else None
    more = {"transposed": t.transposed, "activations": activations}
    return registry.get(on_disk).weight(t.name, scheme, t.matrix, experts=t.experts, **more)


def _quantization_config(
    tensors: list[TensorPlan], on_disk: str, recipe: QuantRecipe, mapper: NameMapper
) -> dict[str, Any]:
    return registry.get(on_disk).config_block(
        [_packed(t, t.scheme, on_disk, recipe) for t in tensors if t.scheme],
        names=[t.module if t.experts is None else t.name for t in tensors],
        dense=_dense_linears(tensors, mapper),
        kv_cache=recipe.kv_cache,
    )


def _dense_linears(tensors: Iterable[TensorPlan], mapper: NameMapper) -> list[str]:
    def in_model(t: TensorPlan) -> str:
        return (mapper(t.name) or t.name).removesuffix(".weight")

    layers = (*_QUANTIZED, KEPT, OUTSIDE, "router", "output head")
    names = {t.module: in_model(t) for t in tensors if not t.scheme and t.kind in layers}
    quantized = [name for t in tensors if t.scheme for name in (t.module, in_model(t))]
    dense = compressed_tensors.ignored(names, quantized)
    # The head is ignored by name even where it is tied and has no tensor of its own.
    return sorted({*dense, "lm_head"}) if not any(t.scheme and t.kind == "output head" for t in tensors) else dense
