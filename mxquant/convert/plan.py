"""The plan of a quantization: every tensor's fate, and every problem that can be known beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.formats import compressed_tensors, native, registry
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.layout import OutputTensor
from mxquant.checkpoint.reader import Checkpoint
from mxquant.checkpoint.writer import plan_shards
from mxquant.codec.qtensor import CHUNK_ELEMENTS
from mxquant.convert.decide import Decided, decide
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import CheckpointError, PlanError
from mxquant.schemes.activations import NONE
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe, activations_text
from mxquant.transformers.architectures import NameMapper, build_meta_model
from mxquant.transformers.behaviour import Behaviour, watch
from mxquant.transformers.classes import auto_class
from mxquant.transformers.kinds import Kind
from mxquant.transformers.linears import loader_linears
from mxquant.transformers.select import engine_problems
from mxquant.transformers.trial import why_not_loadable

_BF16 = "bfloat16"
# What configs call the dtype, today and before.
_DTYPE_KEYS = ("dtype", "torch_dtype")

# fp32 working copies of one chunk that live at once, measured generously.
_CHUNK_COPIES = 16


@dataclass
class QuantPlan:
    """Everything :func:`mxquant.quantize_model` is going to do; see :func:`make_plan`.

    ``tied``: parameters without a tensor of their own, and the one that each shares.
    ``activations``, ``kv_cache``: what the output's config asks for when it runs, as text.
    ``auto_class``: the class of transformers that loads the output.
    ``held_bytes``: of the source's weights in memory, 0 where its files are mapped.
    ``config_changes``: fields of ``config.json`` that differ from the source's, besides ``quantization_config``.
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
    config_changes: dict[str, Any] = field(default_factory=dict)
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
    """Decide what happens to every tensor, from headers, the model class and a trial of its loader.

    Raises ``PlanError`` with *all* problems found: a quantized source, an unknown architecture,
    missing tensors, rules that match nothing, layers left dense by accident, a model that would not load.
    """
    check_not_quantized(checkpoint)
    model = build_meta_model(checkpoint.folder, trust_remote_code=trust_remote_code)
    seen = watch(model)
    decided = decide(checkpoint, recipe, model, seen.written, allow_dense=allow_dense)
    try:
        on_disk, why, config = _container(checkpoint, decided, recipe, model, seen)
    except PlanError:
        # Layers whose weights the model looks at may be what keeps it from running.
        if not any(t.scheme and decided.mapper(t.name) in seen.read for t in decided.tensors):
            raise
        decided = decide(checkpoint, recipe, model, seen.written | seen.read, allow_dense=allow_dense)
        on_disk, why, config = _container(checkpoint, decided, recipe, model, seen)
    tensors = decided.tensors
    warnings = engine_problems(decided.linear_schemes()) if on_disk == compressed_tensors.QUANT_METHOD else []
    changes = _config_changes(checkpoint, on_disk)
    if on_disk == compressed_tensors.QUANT_METHOD:
        readers = "transformers" if warnings else "vLLM, SGLang and transformers"
        as_bf16 = " (which compute it in bfloat16)" if changes else ""
        why = f"{why}: read by {readers} without mxquant{as_bf16}"
    return QuantPlan(
        checkpoint.source,
        tensors,
        on_disk,
        why,
        plan_shards([t.outputs for t in tensors], max_shard_bytes),
        config,
        checkpoint.nbytes,
        decided.tied,
        activations=activations_text(recipe.activations),
        kv_cache=activations_text(recipe.kv_cache),
        auto_class=auto_class(checkpoint.config).__name__,
        held_bytes=checkpoint.held_bytes,
        config_changes=changes,
        warnings=warnings,
    )


def check_not_quantized(checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError`` if the source is quantized already, unless it is read as a dense one."""
    method = registry.method_of(checkpoint.config, checkpoint.folder)
    if method and not checkpoint.decoded:
        way_out = registry.way_to_dense(checkpoint.folder)
        raise CheckpointError(
            f"{checkpoint.folder} is already quantized ({method}); start from the dense model{way_out}"
        )


def _container(
    checkpoint: Checkpoint, decided: Decided, recipe: QuantRecipe, model: Any, seen: Behaviour
) -> tuple[str, str, dict[str, Any]]:
    """The on-disk format, the reason for it and its config; sets the tensors' outputs.

    What many engines read is preferred, if it can say all that there is to say and transformers loads it.
    """
    tensors, mapper = decided.tensors, decided.mapper
    source = [OutputTensor(t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()]
    problem = _why_not_compressed([t for t in tensors if t.scheme], recipe, seen)
    for on_disk in [native.QUANT_METHOD] if problem else [compressed_tensors.QUANT_METHOD, native.QUANT_METHOD]:
        for t in tensors:
            t.outputs = _outputs(t, on_disk)
        config = _quantization_config(tensors, on_disk, recipe, model, mapper)
        outputs = [o for t in tensors for o in t.outputs]
        # compressed-tensors decodes the weights before they are used; ours stay packed as the model runs.
        packed = on_disk == native.QUANT_METHOD
        dtype = None if packed else torch.bfloat16
        # A model that looks at a packed weight may not run; others call the layer.
        run = packed and seen.ran and any(t.scheme and mapper(t.name) in seen.read for t in tensors)
        obstacle = why_not_loadable(model, outputs, config, source, dtype=dtype, run=run)
        if obstacle is None:
            scheme = next(t.scheme for t in tensors if t.scheme)
            return on_disk, problem or str(compressed_tensors.format_name(scheme)), config
        problem = obstacle
    raise PlanError([f"{type(model).__name__} cannot be loaded with packed weights: {problem}"])


def _why_not_compressed(quantized: list[TensorPlan], recipe: QuantRecipe, seen: Behaviour) -> str | None:
    """What compressed-tensors cannot say of the model; None if it can hold it."""
    if recipe.activations or recipe.kv_cache:
        what = "activations" if recipe.activations else "keys and values"
        return f"it says what {what} are rounded to as the model runs"
    names = {compressed_tensors.format_name(t.scheme) for t in quantized if t.scheme}
    if len(names) > 1:
        return "several schemes in one model"
    packed = (_packed(t, t.scheme, compressed_tensors.QUANT_METHOD) for t in quantized if t.scheme)
    reasons = (registry.get(compressed_tensors.QUANT_METHOD).why_not(weight) for weight in packed)
    if reason := next(filter(None, reasons), None):
        return reason
    if any(t.kind is Kind.EXPERTS and t.scheme and t.scheme.global_scale for t in quantized):
        return (
            "transformers ignores the global scales of experts in compressed-tensors, so their weights would be wrong"
        )
    if seen.replaced:
        return f"the model replaces its buffer {min(seen.replaced)} as it runs, which compressed-tensors prevents"
    return None


def _config_changes(checkpoint: Checkpoint, on_disk: str) -> dict[str, Any]:
    """What the output's config says in other words than the source's.

    transformers decodes the weights of compressed-tensors to bfloat16, whatever the dtype of the model, so all of it
    has to be loaded as that. The files keep their dense tensors as they are.
    """
    if on_disk != compressed_tensors.QUANT_METHOD:
        return {}
    found = _in_bf16(checkpoint.config)
    if not any(found.get(key) for key in _DTYPE_KEYS):
        found[_DTYPE_KEYS[0]] = _BF16
    return {key: value for key, value in found.items() if value != checkpoint.config.get(key)}


def _in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """A config, and those of the models inside it, with every dtype that it names replaced."""
    return {
        key: _BF16
        if key in _DTYPE_KEYS and value
        else _in_bf16(value)
        if isinstance(value, dict) and key.endswith("_config")
        else value
        for key, value in config.items()
    }


def _outputs(t: TensorPlan, on_disk: str) -> list[OutputTensor]:
    if t.scheme is None:
        return [OutputTensor(t.name, t.dtype, t.shape)]
    return list(_packed(t, t.scheme, on_disk).parts.values())


def _packed(t: TensorPlan, scheme: QuantScheme, on_disk: str, recipe: QuantRecipe | None = None) -> PackedWeight:
    activations = recipe.activations_for(scheme) if recipe else None
    more = {"transposed": t.transposed, "activations": activations}
    return registry.get(on_disk).weight(t.name, scheme, t.matrix, experts=t.experts, **more)


def _quantization_config(
    tensors: list[TensorPlan], on_disk: str, recipe: QuantRecipe, model: Any, mapper: NameMapper
) -> dict[str, Any]:
    return registry.get(on_disk).config_block(
        [_packed(t, t.scheme, on_disk, recipe) for t in tensors if t.scheme],
        names=[t.module if t.experts is None else t.name for t in tensors],
        dense=_dense_layers(tensors, model, mapper),
        kv_cache=recipe.kv_cache,
    )


def _dense_layers(tensors: Iterable[TensorPlan], model: Any, mapper: NameMapper) -> list[str]:
    """What compressed-tensors' ``ignore`` must name, as loaders expect every linear layer to be packed.

    That is each ``nn.Linear`` of the model that is not, tied ones included, and each matrix of the files that is no
    embedding: engines load layers that the model's class does without, such as those that predict several tokens.
    """

    def in_model(name: str) -> str:
        return (mapper(name) or name).removesuffix(".weight")

    packed = {name for t in tensors if t.scheme for name in (t.module, in_model(t.name))}
    names = {
        t.module: in_model(t.name)
        for t in tensors
        if not t.scheme and t.name.endswith(".weight") and len(t.shape) == 2 and t.kind is not Kind.EMBEDDING
    }
    known = {*packed, *names.values()}
    names |= {n: n for n in loader_linears(model) if n not in known}
    return sorted(set(compressed_tensors.ignored(names, packed)))
