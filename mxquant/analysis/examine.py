"""``diagnose``: measure what schemes do to a model's weights, and what that is expected to cost the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxquant.analysis.defaults import SCHEMES
from mxquant.analysis.diagnosis import Diagnosis
from mxquant.analysis.measure import check_blocks, measure
from mxquant.analysis.places import place
from mxquant.analysis.sensitivity import Calibration, Sensitivity
from mxquant.checkpoint.reader import Checkpoint
from mxquant.convert.open_source import open_source
from mxquant.convert.pipeline import DEFAULT_SHARD_BYTES
from mxquant.convert.plan import QuantPlan, make_plan
from mxquant.convert.tensor_plan import TensorPlan
from mxquant.errors import MXQuantError, SchemeError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.transformers.architectures import NameMapper, build_meta_model, inventory

# Stands for all schemes in the plan: with a global scale, so that the plan says which tensors would share it.
_ANY = QuantScheme(scale="e4m3", block=16, global_scale=True)


@dataclass(frozen=True)
class Subject:
    """A model that can be diagnosed: its files are open, its layers known, the schemes fit them."""

    checkpoint: Checkpoint
    plan: QuantPlan
    schemes: list[QuantScheme]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Weights to quantize, each scheme counted."""
        return len(self.schemes) * sum(t.parameters for t in self.plan.quantized)


def prepare(
    source: str | Path,
    schemes: Sequence[QuantScheme | str] = SCHEMES,
    *,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Subject:
    """Open a folder of safetensors or a hub id; ``include`` and ``exclude`` are those of ``QuantRecipe``.

    Raises ``CheckpointError`` or ``PlanError`` for sources that cannot be quantized, ``SchemeError`` for schemes
    that do not exist or whose blocks are larger than a tensor.
    """
    parsed = [QuantScheme.parse(s) if isinstance(s, str) else s for s in schemes]
    wanted = list(dict.fromkeys(parsed))
    if not wanted:
        raise SchemeError("give at least one scheme, such as ue5m3/16")
    checkpoint = open_source(source, revision=revision)

    def planned(scheme: QuantScheme) -> QuantPlan:
        return make_plan(
            checkpoint,
            QuantRecipe(default=scheme, include=include, exclude=exclude),
            max_shard_bytes=DEFAULT_SHARD_BYTES,
            allow_dense=True,  # a diagnosis says what it is about; `quantize` is strict
            trust_remote_code=trust_remote_code,
        )

    plan = planned(_ANY)
    for scheme in wanted:
        if scheme.block_shape[0] > 1:  # not every layer can have tiles
            planned(scheme)
    _sort(checkpoint, plan, trust_remote_code)
    for scheme in wanted:
        check_blocks(scheme, plan.quantized)
    return Subject(checkpoint, plan, wanted, include, exclude)


def _sort(checkpoint: Checkpoint, plan: QuantPlan, trust_remote_code: bool) -> None:
    """Tensors in the order of the model; files have them by the alphabet."""
    model = build_meta_model(checkpoint.folder, trust_remote_code=trust_remote_code)
    mapper, places = NameMapper(model), {p.name: i for i, p in enumerate(inventory(model))}
    plan.tensors.sort(key=lambda t: places.get(mapper(t.name) or "", len(places)))


def examine(
    subject: Subject,
    *,
    calibration: Calibration | None = None,
    sample: float = 1.0,
    progress: Callable[[int], None] = lambda weights: None,
) -> Diagnosis:
    """Measure every scheme on every linear weight: no forward pass, memory as in quantizing.

    Parameters
    ----------
    calibration : what errors cost, from :func:`mxquant.evals.calibration.calibrate`.
    sample : share of the rows to look at; global scales come from whole tensors all the same.
    progress : called with the number of weights done since the last call, each scheme counted.

    Raises ``WeightError`` for weights that are not finite.
    """
    if not 0 < sample <= 1:
        raise SchemeError(f"a sample is a share above 0 and up to 1, not {sample:g}")
    tensors = subject.plan.quantized
    known, assumed = _complete(tensors, calibration)
    found = measure(subject.checkpoint, tensors, subject.schemes, sensitivity=known, sample=sample, progress=progress)
    return Diagnosis(
        subject.plan, subject.schemes, found, sample, calibration, assumed, subject.include, subject.exclude
    )


def diagnose(source: str | Path, schemes: Sequence[QuantScheme | str] = SCHEMES) -> Diagnosis:
    """:func:`examine` a model from its weights alone; see :class:`mxquant.analysis.diagnosis.Diagnosis`."""
    return examine(prepare(source, schemes))


def _complete(
    tensors: Sequence[TensorPlan], calibration: Calibration | None
) -> tuple[dict[str, Sensitivity], list[str]]:
    """Sensitivities by matrix, and the names of those that had none and got the mean of their like."""
    if calibration is None:
        return {}, []
    found, assumed = dict(calibration.sensitivity), []
    alike: dict[tuple[str, tuple[int, int]], list[str]] = defaultdict(list)
    for t in tensors:
        alike[place(t.module)[1], t.matrix] += t.matrix_names
    for (projection, _), names in alike.items():
        known = [found[n] for n in names if n in found and not found[n].is_zero]
        unknown = [n for n in names if n not in found or found[n].is_zero]
        if unknown and not known:
            raise MXQuantError(
                f"no token of the calibration text {calibration.text} reaches {unknown[0]}, nor any other "
                f"{projection}; exclude them, or do without calibration"
            )
        if unknown:
            found |= dict.fromkeys(unknown, Sensitivity.mean(known))
            assumed += unknown
    return found, assumed
