"""The streaming quantizer: plan, then shards, then report.

Weights are read as views of mapped files and handled a few rows at a time, so memory does not grow
with the model. The output is built in ``<out>.partial`` and takes its name when it is whole.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import mxquant
from mxquant.checkpoint import compressed_tensors
from mxquant.checkpoint.layout import INDEX_NAME, REPORT_NAME
from mxquant.checkpoint.reader import Checkpoint, resolve_source
from mxquant.checkpoint.writer import ShardWriter, index_json, shard_names
from mxquant.formats import QuantScheme
from mxquant.memory import PeakMemory
from mxquant.methods.rtn import QuantStats, check_weight, quantize_chunks, tensor_amax
from mxquant.output import carry_side_files, check_disk_space, check_output, copy_tensor, open_shard, output_folder
from mxquant.plan import QuantPlan, TensorPlan, make_plan
from mxquant.recipe import QuantRecipe
from mxquant.report import QuantReport
from mxquant.scaling import global_scale_for
from mxquant.scan import small_scale_warnings

DEFAULT_SHARD_BYTES = 5_000_000_000
# Called with a tensor's name and how many of its parameters are done since the last call.
Progress = Callable[[str, int], None]


def quantize_model(
    source: str | Path,
    out: str | Path,
    scheme: QuantScheme | QuantRecipe | str,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    allow_dense: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> QuantReport:
    """Quantize a checkpoint's weights and write the result to ``out``.

    Parameters
    ----------
    source : folder of safetensors, or a hub id.
    out : folder to write; must not exist or be empty, unless ``overwrite``.
    scheme : one scheme (or a preset's name) for all linear layers, or a recipe.
    device : where the arithmetic runs; the bytes are the same everywhere.
    seed : of stochastic rounding.
    allow_dense : accept that many weights stay dense without a rule saying so.

    Raises ``PlanError`` or ``CheckpointError`` before any work starts if the request cannot be
    met, and ``WeightError`` for NaN or infinities; then nothing is left behind.
    """
    checkpoint, plan = plan_model(
        source,
        scheme,
        max_shard_bytes=max_shard_bytes,
        allow_dense=allow_dense,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    return run_plan(checkpoint, plan, out, device=device, seed=seed, overwrite=overwrite, progress=progress)


def plan_model(
    source: str | Path,
    scheme: QuantScheme | QuantRecipe | str,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_dense: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[Checkpoint, QuantPlan]:
    """Open the source and plan its quantization; arguments as for :func:`quantize_model`."""
    checkpoint = Checkpoint(resolve_source(source, revision=revision))
    plan = make_plan(
        checkpoint,
        QuantRecipe.of(scheme),
        max_shard_bytes=max_shard_bytes,
        allow_dense=allow_dense,
        trust_remote_code=trust_remote_code,
    )
    plan.warnings += small_scale_warnings(checkpoint, plan)
    return checkpoint, plan


def run_plan(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantReport:
    """Carry out a plan; arguments as for :func:`quantize_model`."""
    out = Path(out)
    check_output(out, checkpoint.folder, overwrite)
    check_disk_space(out.absolute(), plan.bytes_after)
    started = time.perf_counter()
    stats: dict[str, QuantStats] = {}
    with PeakMemory() as memory, output_folder(out) as folder:
        work = _Quantizer(checkpoint, plan, torch.device(device), seed, progress or (lambda name, count: None))
        names = shard_names(len(plan.shards))
        by_output = {t.outputs[0].name: t for t in plan.tensors}
        for file, shard in zip(names, plan.shards, strict=True):
            with open_shard(folder / file, shard) as writer:
                for t in (by_output[o.name] for o in shard if o.name in by_output):
                    made = work.copy(t, writer) if t.scheme is None else work.quantize(t, writer)
                    if made is not None:
                        stats[t.name] = made
        if len(names) > 1:
            (folder / INDEX_NAME).write_text(index_json(plan.shards))
        carry_side_files(checkpoint, folder)
        seconds = time.perf_counter() - started
        report = QuantReport(
            plan, str(out), stats, seconds, memory.peak, memory.start, seed, versions()
        )
        (folder / REPORT_NAME).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        config = {**checkpoint.config, "quantization_config": plan.quantization_config}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    report.peak_bytes = memory.peak
    return report


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    import transformers

    return {
        "mxquant": mxquant.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


class _Quantizer:
    """Carries tensors of one plan from the source to a shard."""

    def __init__(
        self, checkpoint: Checkpoint, plan: QuantPlan, device: torch.device, seed: int, progress: Progress
    ):
        self._checkpoint, self._plan, self._device, self._seed = checkpoint, plan, device, seed
        self._progress = progress
        self._group_amax: dict[str, torch.Tensor] = {}

    def copy(self, t: TensorPlan, writer: ShardWriter) -> None:
        copy_tensor(self._checkpoint, t.name, writer)
        self._progress(t.name, t.parameters)

    def quantize(self, t: TensorPlan, writer: ShardWriter) -> QuantStats:
        scheme = t.scheme
        assert scheme is not None
        weight = self._read(t)
        check_weight(weight, t.name)
        packed, scale, *global_output = t.outputs
        global_scale = None
        if scheme.global_scale:
            global_scale = global_scale_for(self._amax(t, weight), scheme)
            writer.write(global_output[0].name, global_scale)
        in_compressed_tensors = self._plan.on_disk == compressed_tensors.QUANT_METHOD
        total, packed_at, scale_at = QuantStats(), 0, 0
        chunks = quantize_chunks(
            weight,
            scheme,
            seed=self._seed,
            name=t.name,
            global_scale=global_scale,
            device=self._device,
            with_stats=True,
        )
        for chunk in chunks:
            scales = compressed_tensors.stored_scale(chunk.scale, scheme) if in_compressed_tensors else chunk.scale
            writer.write(packed.name, chunk.packed, packed_at)
            writer.write(scale.name, scales, scale_at)
            packed_at += chunk.packed.numel()
            scale_at += scales.numel() * scales.element_size()
            assert chunk.stats is not None
            total = total + chunk.stats
            self._progress(t.name, chunk.stats.elements)
        return total

    def _read(self, t: TensorPlan) -> torch.Tensor:
        weight = self._checkpoint.read(t.name)
        return weight.t() if t.transposed else weight

    def _amax(self, t: TensorPlan, weight: torch.Tensor) -> torch.Tensor:
        """Largest magnitude of the tensor, or of its fused group: engines use one scale for all."""
        if t.group is None:
            return tensor_amax(weight)
        if t.group not in self._group_amax:
            members = [m for m in self._plan.quantized if m.group == t.group]
            self._group_amax[t.group] = torch.stack([tensor_amax(self._read(m)) for m in members]).amax()
        return self._group_amax[t.group]
