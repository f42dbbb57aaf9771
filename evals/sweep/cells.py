"""Measuring one cell of a sweep: the dense model in memory, with quantized weights in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mxquant.codec.amax import tensor_amax
from mxquant.codec.parallel import Workers
from mxquant.codec.qtensor import QTensor
from mxquant.codec.rounding import QuantStats, RowQuantizer, check_weight
from mxquant.codec.scaling import global_scale_for
from mxquant.errors import MXQuantError
from mxquant.evals.inplace import LinearWeight, RememberingVariant, Variant
from mxquant.evals.perplexity import Perplexity, evaluate
from mxquant.evals.sweep.grid import CellSpec
from mxquant.ops.operators import quantize_rows
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.fused import fused_groups

if TYPE_CHECKING:
    from mxquant.evals.tasks import TaskSet

Progress = Callable[[int, int], None]


@dataclass
class Cell:
    """What one combination did; ``spec`` None is the dense model, which has no weight figures.

    Attributes
    ----------
    perplexity : None where there is none, and then ``problem`` says why.
    window_nll : mean negative log-likelihood of each window, in nats.
    ratio, kl, agreement : against the dense model, intervals at 95 %; see ``Divergence``.
    relative_error : of all quantized weights together, root of squared error over squared norm.
    zero_scales, subnormal_scales : share of the weights' blocks, of all blocks.
    bits_per_weight : stored bits of the quantized weights, scales included.
    tasks : task -> metric -> value and standard error.
    notes : what a reader of the figures must know.
    """

    spec: CellSpec | None
    perplexity: float | None
    problem: str | None
    window_nll: list[float]
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    kl: float | None = None
    kl_interval: tuple[float, float] | None = None
    agreement: float | None = None
    relative_error: float | None = None
    zero_scales: float | None = None
    subnormal_scales: float | None = None
    bits_per_weight: float | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def small_scales(self) -> float:
        """Share of blocks whose scale is zero or has lost significant bits."""
        return (self.zero_scales or 0.0) + (self.subnormal_scales or 0.0)

    @property
    def text(self) -> str:
        return "dense" if self.spec is None else self.spec.text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"spec": None if self.spec is None else self.spec.to_dict()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Cell:
        """Inverse of :meth:`to_dict`, through JSON or not."""
        fields = dict(fields)
        fields["spec"] = None if fields["spec"] is None else CellSpec.from_dict(fields["spec"])
        for name in ("ratio_interval", "kl_interval"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


@dataclass
class Bench:
    """What all cells of a sweep share: the dense model, its linear weights, and what it is asked."""

    dense: RememberingVariant
    windows: torch.Tensor
    batch_size: int = 1
    tasks: TaskSet | None = None
    limit: float | None = None
    num_fewshot: int | None = None

    @property
    def linears(self) -> list[LinearWeight]:
        return self.dense.linears


def measure(bench: Bench, spec: CellSpec | None, progress: Progress = lambda done, total: None) -> Cell:
    """Measure one cell, or without a spec the dense model.

    Raises ``MXQuantError`` if the dense model has no perplexity; a cell that has none is marked.
    """
    began = time.perf_counter()
    variant: Variant = bench.dense
    if spec is None:
        (found,) = evaluate([bench.dense], bench.windows, batch_size=bench.batch_size, progress=progress)
        if found.problem:
            raise MXQuantError(f"{bench.dense.source}: {found.problem}")
        cell = _cell(None, found)
    elif too_long := _too_long(bench.linears, spec.weights):
        return Cell(spec, None, too_long, [])
    else:
        weights, stats, bits = quantize_weights(bench.linears, spec.weights)
        variant = Variant.of(bench.dense, spec.text, bench.linears, weights=weights, activations=spec.activations)
        _, found = evaluate(
            [variant], bench.windows, baseline=bench.dense, batch_size=bench.batch_size, progress=progress
        )
        cell = _cell(spec, found)
        cell.relative_error, cell.bits_per_weight = stats.relative_error, bits
        cell.zero_scales = stats.zero_scales / stats.blocks
        cell.subnormal_scales = stats.subnormal_scales / stats.blocks
        cell.notes = _notes(variant, spec.weights)
    if bench.tasks is not None and not cell.problem:
        cell.tasks = _run_tasks(bench, variant)
    cell.seconds = time.perf_counter() - began
    return cell


def _cell(spec: CellSpec | None, found: Perplexity) -> Cell:
    nll = [] if found.problem else found.window_nll.tolist()
    cell = Cell(spec, found.perplexity, found.problem, nll)
    if (d := found.divergence) is not None:
        cell.ratio, cell.ratio_interval = d.ratio, d.ratio_interval
        cell.kl, cell.kl_interval, cell.agreement = d.kl, d.kl_interval, d.agreement
    return cell


def quantize_weights(
    linears: Sequence[LinearWeight], scheme: QuantScheme
) -> tuple[list[torch.Tensor], QuantStats, float]:
    """What the linear weights decode to, what quantizing did to them, and stored bits per weight.

    As :func:`mxquant.quantize_model` does it: projections that engines fuse share a global scale.
    """
    amax = _global_amax(linears) if scheme.global_scale else {}
    decoded, stats, nbytes = [], QuantStats(), 0
    for linear in linears:
        packed = []
        for number, matrix in enumerate(linear.matrices):
            q, one = _quantize(matrix, scheme, linear.name, amax.get((linear.name, number)))
            packed.append(q)
            stats, nbytes = stats + one, nbytes + q.nbytes
        decoded.append(linear.decoded(packed))
    return decoded, stats, 8 * nbytes / stats.elements


def _global_amax(linears: Sequence[LinearWeight]) -> dict[tuple[str, int], torch.Tensor]:
    """The largest magnitude that each matrix's global scale is made for."""
    own: dict[tuple[str, int], tuple[str, int]] = {}
    groups: dict[tuple[str, int], torch.Tensor] = {}
    fused = fused_groups(linear.name.removesuffix(".weight") for linear in linears)
    for linear in linears:
        for number, matrix in enumerate(linear.matrices):
            group = fused.get(linear.name.removesuffix(".weight"), linear.name), number
            own[linear.name, number] = group
            amax = tensor_amax(matrix)
            groups[group] = torch.maximum(groups.get(group, amax), amax.to(groups.get(group, amax).device))
    return {key: groups[group] for key, group in own.items()}


def _quantize(
    matrix: torch.Tensor, scheme: QuantScheme, name: str, amax: torch.Tensor | None
) -> tuple[QTensor, QuantStats]:
    check_weight(matrix, name)
    global_scale = None if amax is None else global_scale_for(amax.to(matrix.device), scheme)
    job = RowQuantizer(
        matrix, scheme, seed=0, name=name, global_scale=global_scale, with_stats=True, quantize=quantize_rows
    )
    with Workers(matrix.device) as workers:
        chunks = list(workers.map(job, job.starts))
    stats = sum((chunk.stats for chunk in chunks if chunk.stats is not None), QuantStats())
    packed, scale = torch.cat([chunk.packed for chunk in chunks]), torch.cat([chunk.scale for chunk in chunks])
    return QTensor(packed, scale, global_scale, (matrix.shape[0], matrix.shape[1]), scheme), stats


def _too_long(linears: Sequence[LinearWeight], scheme: QuantScheme) -> str | None:
    """Why a block would mean the same as a shorter one in every row, if it would."""
    longest = max(matrix.shape[1] for linear in linears for matrix in linear.matrices)
    if scheme.block_shape[1] <= longest:
        return None
    return f"block {scheme.block_text} is longer than the longest row of the model's weights, {longest}"


def _notes(variant: Variant, scheme: QuantScheme) -> list[str]:
    """What does not fit between the scheme and the model."""
    matrices = [matrix for linear in variant.linears for matrix in linear.matrices]
    notes = []
    columns = scheme.block_shape[1]
    short = [matrix.shape[1] for matrix in matrices if matrix.shape[1] < columns]
    if short:
        notes.append(f"a block of {columns} is longer than the rows of {len(short)} of {len(matrices)} matrices")
    largest, fmt = max(float(tensor_amax(matrix)) for matrix in matrices), scheme.scale_format
    if fmt.coded and not scheme.global_scale and largest > fmt.max * scheme.element_format.max:
        reach = fmt.max * scheme.element_format.max
        notes.append(f"{fmt.name} scales reach weights of {reach:g}, these go up to {largest:g} and are cut off")
    missed = [linear.name for linear in variant.linears if linear.module not in variant.called]
    if variant.activations is not None and missed:
        notes.append(
            f"{len(missed)} of {len(variant.linears)} layers were never called, so that their inputs "
            f"were not quantized, e.g. {missed[0]}"
        )
    return notes


def _run_tasks(bench: Bench, variant: Variant) -> dict[str, dict[str, Any]]:
    assert bench.tasks is not None
    with variant.in_place():
        metrics = bench.tasks.run(
            variant, limit=bench.limit, num_fewshot=bench.num_fewshot, batch_size=bench.batch_size
        )
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        found.setdefault(metric.task, {})[metric.name] = metric.to_dict()
    return found
