"""The streaming quantizer: plan, then shards, then report.

Weights are read as views of mapped files and handled a few rows at a time, so memory does not grow
with the model. The output is built in ``<out>.partial`` and takes its name when it is whole.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from mxquant.checkpoint.fingerprint import fingerprint, without_times
from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.layout import FLOAT_DTYPES, INDEX_NAME, REPORT_NAME
from mxquant.checkpoint.reader import Checkpoint
from mxquant.checkpoint.writer import ShardWriter, index_json, shard_names
from mxquant.codec.amax import group_amax, tensor_amax
from mxquant.codec.parallel import Workers
from mxquant.codec.rounding import QuantStats, RowChunk, RowQuantizer, check_finite, check_weight
from mxquant.codec.scaling import global_scale_for
from mxquant.convert.card.files import write_card
from mxquant.convert.manifest import Manifest, identify
from mxquant.convert.memory import PeakMemory
from mxquant.convert.open_source import open_source
from mxquant.convert.output import carry_side_files, check_disk_space, check_output, copy_tensor, open_shard
from mxquant.convert.plan import QuantPlan, make_plan
from mxquant.convert.report import QuantReport
from mxquant.convert.scan import fit_warnings
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.convert.work_folder import work_folder
from mxquant.ops import backends
from mxquant.ops.operators import quantize_rows
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.kinds import Kind

DEFAULT_SHARD_BYTES = 5_000_000_000
# Kinds of tensors that may well hold infinities, such as masks.
_NO_WEIGHTS = (Kind.BUFFER, Kind.IGNORED, Kind.UNKNOWN)
# Called with a tensor's name and how many of its parameters are done since the last call.
Progress = Callable[[str, int], None]
# Called with a sentence for the user.
Notify = Callable[[str], None]


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
    resume: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> QuantReport:
    """Quantize a checkpoint's weights and write the result to ``out``.

    Parameters
    ----------
    source : folder of safetensors or ``pytorch_model.bin``, a hub id, or a ``.gguf`` file.
    out : folder to write; must not exist or be empty, unless ``overwrite``, which also gives up what
        an interrupted run has left.
    scheme : one scheme (or a preset's name) for all linear layers, or a recipe.
    device : where the arithmetic runs; the bytes are the same everywhere.
    seed : of stochastic rounding.
    allow_dense : accept that many weights stay dense without a rule saying so.
    resume : go on where a run that was killed or interrupted stopped; the output is the same as
        without the interruption, byte for byte. Without such a run it makes no difference, and an
        output that is complete stays. Shards that are finished also survive errors then.
    progress, notify : called with what is done; with a sentence on what is resumed.

    Raises ``PlanError`` or ``CheckpointError`` before any work starts if the request cannot be
    met, or if there is something to resume of another source or recipe; ``WeightError`` for NaN or
    infinities, and then nothing is left behind.
    """
    checkpoint, plan = plan_model(
        source,
        scheme,
        max_shard_bytes=max_shard_bytes,
        allow_dense=allow_dense,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    return run_plan(
        checkpoint,
        plan,
        out,
        device=device,
        seed=seed,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
        notify=notify,
    )


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
    checkpoint = open_source(source, revision=revision)
    plan = make_plan(
        checkpoint,
        QuantRecipe.of(scheme),
        max_shard_bytes=max_shard_bytes,
        allow_dense=allow_dense,
        trust_remote_code=trust_remote_code,
    )
    plan.warnings += [*checkpoint.warnings, *checkpoint.side_files().warnings(), *fit_warnings(checkpoint, plan)]
    return checkpoint, plan


def run_plan(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> QuantReport:
    """Carry out a plan; arguments as for :func:`quantize_model`."""
    out, notify = Path(out), notify or (lambda text: None)
    run = _Run(checkpoint, plan, torch.device(device), seed, progress or (lambda name, count: None))
    source, made_with = fingerprint(checkpoint), versions()
    done = QuantReport.of_output(out, plan, seed, made_with, source) if resume else None
    if done is not None:
        notify(f"{out} is already complete; nothing to do.")
        with work_folder(out) as work:
            work.clear()
        return done
    check_output(out, checkpoint, overwrite)
    with work_folder(out) as work:
        check_output(out, checkpoint, overwrite)  # what a killed process had put aside is back
        settings = {"seed": seed, "device": run.device.type, "kernels": _kernels(run.device)}
        identity = identify(source, plan, settings, made_with)
        manifest = Manifest.start(work, identity, plan, resume=resume, overwrite=overwrite)
        if resume:
            notify(manifest.summary())
        report = QuantReport(plan, str(out), {}, 0.0, None, None, seed, made_with, without_times(source))
        try:
            _build(checkpoint, run, manifest, work.model, report)
            work.publish()
        except BaseException as error:
            if not (manifest.finished and (resume or not isinstance(error, Exception))):
                work.clear()
            raise
        work.clear()
    return report


def _build(checkpoint: Checkpoint, run: _Run, manifest: Manifest, folder: Path, report: QuantReport) -> None:
    """Write into ``folder`` what is not finished, and complete the report; what makes it a model comes last."""
    plan = report.plan
    check_disk_space(
        Path(report.out).absolute(), plan.bytes_after - sum(file.stat().st_size for file in folder.iterdir())
    )
    started = time.perf_counter()
    with PeakMemory() as memory:
        report.resumed_parameters = run.write_shards(folder, manifest)
        if len(plan.shards) > 1:
            (folder / INDEX_NAME).write_text(index_json(plan.shards))
        carry_side_files(checkpoint, folder)
        report.stats = {t.name: run.stats[t.name] for t in plan.quantized}
        data = report.to_file()
        (folder / REPORT_NAME).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
        write_card(folder, data)
        config = {**checkpoint.config, **plan.config_changes, "quantization_config": plan.quantization_config}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    report.seconds = time.perf_counter() - started
    report.base_bytes, report.peak_bytes = memory.start, memory.peak


@dataclass
class _Job:
    """Some rows of one matrix to quantize, and where they go in the output: it is number ``index`` of its tensor."""

    tensor: TensorPlan
    index: int
    quantizer: RowQuantizer
    start: int


class _Run:
    """Carries the tensors of one plan from the source to shards; ``stats`` says what it did to each."""

    def __init__(self, checkpoint: Checkpoint, plan: QuantPlan, device: torch.device, seed: int, progress: Progress):
        self.device = device
        self.stats: dict[str, QuantStats] = {}
        self._checkpoint, self._plan, self._seed, self._progress = checkpoint, plan, seed, progress
        self._format = registry.get(plan.on_disk)
        self._tensors = {t.outputs[0].name: t for t in plan.tensors}
        self._groups: dict[str, list[TensorPlan]] = defaultdict(list)
        for t in plan.quantized:
            if t.group is not None:
                self._groups[t.group].append(t)
        self._group_amax: dict[tuple[str, int], torch.Tensor] = {}

    def write_shards(self, folder: Path, manifest: Manifest) -> int:
        """Write the shards that are not finished; returns how many parameters are in those that are.

        The disk catches up on one while the next is made. The last is not listed as finished: after
        it there is next to nothing left to do.
        """
        files = [folder / name for name in shard_names(len(self._plan.shards))]
        finished, resumed = manifest.finished, 0
        with Workers(self.device) as workers, ThreadPoolExecutor(1) as disk:
            pending = []
            for file, shard in zip(files, self._plan.shards, strict=True):
                tensors = [self._tensors[o.name] for o in shard if o.name in self._tensors]
                if file.name in finished:
                    self.stats |= finished[file.name]
                    for t in tensors:
                        resumed += t.parameters
                        self._progress(t.name, t.parameters)
                    continue
                with open_shard(file, shard) as writer:
                    self.write_shard(tensors, writer, workers)
                if file is not files[-1]:
                    stats = {t.name: self.stats[t.name] for t in tensors if t.scheme}
                    pending.append(disk.submit(manifest.add, file, stats))
            for future in pending:
                future.result()
        return resumed

    def write_shard(self, tensors: list[TensorPlan], writer: ShardWriter, workers: Workers) -> None:
        """Copy and quantize the tensors of a shard. Rows of several tensors are in work at once."""
        jobs = self._jobs(tensors, writer)
        for job, chunk in workers.map(lambda job: (job, job.quantizer(job.start)), jobs):
            self._write_rows(job, chunk, writer)

    def _jobs(self, tensors: list[TensorPlan], writer: ShardWriter) -> Iterator[_Job]:
        for t in tensors:
            if t.scheme is None:
                if t.kind not in _NO_WEIGHTS and t.dtype in FLOAT_DTYPES:
                    check_finite(self._checkpoint.read(t.name), t.name)
                copy_tensor(self._checkpoint, t.name, writer)
                self._progress(t.name, t.parameters)
                continue
            for index, (name, weight) in enumerate(t.read_matrices(self._checkpoint)):
                yield from self._matrix_jobs(t, index, name, weight, writer)

    def _matrix_jobs(
        self, t: TensorPlan, index: int, name: str, weight: torch.Tensor, writer: ShardWriter
    ) -> Iterator[_Job]:
        assert t.scheme is not None
        check_weight(weight, name)
        global_scale = None
        if t.scheme.global_scale:
            global_scale = global_scale_for(self._amax(t, index, weight), t.scheme)
            writer.write(t.outputs[2].name, global_scale, 4 * index)
        quantizer = RowQuantizer(
            weight,
            t.scheme,
            seed=self._seed,
            name=name,
            global_scale=global_scale,
            device=self.device,
            with_stats=True,
            quantize=quantize_rows,
        )
        for start in quantizer.starts:
            yield _Job(t, index, quantizer, start)

    def _write_rows(self, job: _Job, chunk: RowChunk, writer: ShardWriter) -> None:
        t = job.tensor
        assert t.scheme is not None
        assert chunk.stats is not None
        packed, scale = t.outputs[:2]
        scales = self._format.stored_scale(chunk.scale, t.scheme)
        row = job.index * t.matrix[0] + chunk.start
        writer.write(packed.name, chunk.packed, row * chunk.packed.shape[1])
        row_bytes = scales.shape[1] * scales.element_size()
        row = job.index * t.scheme.scale_shape(t.matrix)[0] + chunk.start // t.scheme.block_shape[0]
        writer.write(scale.name, scales, row * row_bytes)
        self.stats[t.name] = self.stats.get(t.name, QuantStats()) + chunk.stats
        self._progress(t.name, chunk.stats.elements)

    def _amax(self, t: TensorPlan, index: int, weight: torch.Tensor) -> torch.Tensor:
        """Largest magnitude of the matrix, or of its fused group: engines use one scale for all."""
        if t.group is None:
            return tensor_amax(weight)
        key = (t.group, index)
        if key not in self._group_amax:
            self._group_amax[key] = group_amax(m.read_matrix(self._checkpoint, index) for m in self._groups[t.group])
        return self._group_amax[key]


def _kernels(device: torch.device) -> str:
    """What computes: the sums of errors in the report depend on it in their last digits."""
    found = backends.backend(device.type)
    return "reference" if found is None else found.describe("quantize")


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    packages = ("mxquant", "torch", "transformers")
    return {**{p: importlib.metadata.version(p) for p in packages}, "python": platform.python_version()}
