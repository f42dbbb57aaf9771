"""``verify_checkpoint``: everything that can be known to be wrong with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.formats.base import Layout, UnknownFormatError
from mxquant.checkpoint.reader import Checkpoint, resolve_source
from mxquant.errors import CheckpointError
from mxquant.inspection.against_source import SourceComparison, check_dense_tensors, open_source, sample
from mxquant.inspection.agreement import Model, check_config, check_groups, check_model, check_tied, groups
from mxquant.inspection.faults import Verification
from mxquant.inspection.files import check_files
from mxquant.inspection.linears import check_fused, check_linears, check_stale
from mxquant.inspection.lint import lint
from mxquant.inspection.load import check_load
from mxquant.inspection.summary import Progress, Steps
from mxquant.inspection.values import check_dense, check_packed

# Packed weights compared with the source, unless all are.
SAMPLE = 16


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    *,
    samples: int | None = SAMPLE,
    load: bool | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Look for faults in a checkpoint, packed or dense.

    Parameters
    ----------
    path : a folder or a hub id.
    source : the dense checkpoint (or gpt-oss's own) that it was made from; then every dense tensor is compared with it,
        and some packed weights.
    samples : how many packed weights to compare with the source; None for all.
    load : whether to load the model as users do and compare it with the files, see
        :func:`mxquant.inspection.load.check_load`; None does if nothing else is wrong and memory suffices.
    progress : called with a tensor's name, how many have been looked at and how many there are.

    Returns all faults, not the first alone; files that cannot be opened end the search, as nothing
    else can be read. Raises ``CheckpointError`` where there is nothing to verify: no such folder, a
    unsupported quantization, a source that is not dense.
    """
    folder = resolve_source(path)
    original = None if source is None else open_source(source)
    found = Verification(str(folder))
    check_files(folder, found)
    if any(fault.kind == "files" for fault in found.faults):
        return found
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        found.add("files", str(error))
        return found
    layout = _layout(checkpoint, found)
    if layout is not None:
        _check(checkpoint, layout, original, found, samples, load, trust_remote_code, progress)
    return found


def _layout(checkpoint: Checkpoint, found: Verification) -> Layout | None:
    """The packed weights; a config of a known method that cannot be read is a fault."""
    try:
        return registry.find(checkpoint)
    except UnknownFormatError:
        raise
    except CheckpointError as error:
        found.add("config", str(error))
        return None


def _check(
    checkpoint: Checkpoint,
    layout: Layout,
    source: Checkpoint | None,
    found: Verification,
    samples: int | None,
    load: bool | None,
    trust_remote_code: bool,
    progress: Progress | None,
) -> None:
    whole = check_config(checkpoint, layout, found)
    model = Model.of(checkpoint, found, trust_remote_code=trust_remote_code)
    tied: set[str] = set()
    if model is not None:
        check_model(checkpoint, layout, model, found)
        check_linears(checkpoint, layout, model, found)
        check_tied(checkpoint, layout, model, found)
        tied = {p.name for p in model.parameters.values() if p.tied_to}
    parts = layout.part_names
    others = [name for name in checkpoint.tensors if name not in parts]
    compared = sample(whole, samples) if source is not None else []
    steps = len(whole) + len(others) + (len(others) + len(compared) if source is not None else 0)
    advance = Steps(steps, progress)
    check_stale(layout, model, found)
    check_fused(checkpoint, layout, found)
    check_groups(checkpoint, whole, model, found)
    found.warnings += lint(layout.weights, layout.method)
    check_packed(checkpoint, whole, found, advance)
    check_dense(checkpoint, others, found, advance)
    if source is not None:
        check_dense_tensors(checkpoint, layout, source, tied, found, advance)
        compare = SourceComparison(checkpoint, source, groups(layout.weights, model), everything=samples is None)
        compare(compared, found, advance)
    check_load(checkpoint, layout, model, found, load, trust_remote_code=trust_remote_code)
