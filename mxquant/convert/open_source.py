"""What can be quantized: a model of any kind of file, opened as a :class:`Checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path

from mxquant.checkpoint import pytorch
from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.layout import INDEX_NAME, SINGLE_NAME
from mxquant.checkpoint.reader import Checkpoint, read_config, resolve_source
from mxquant.errors import CheckpointError
from mxquant.ops.operators import dequantize
from mxquant.transformers.gguf import GgufCheckpoint


def open_source(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a model to quantize.

    ``source``: a folder or hub id with safetensors, or without them ``pytorch_model.bin``; a
    ``.gguf`` file, or a folder with one and no other weights. gpt-oss's MXFP4 is decoded as it is
    read. Raises ``CheckpointError`` for anything else, and for files that are missing or broken.
    """
    path = Path(os.path.expanduser(source))
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a file, which has no revisions; drop --revision {revision}")
        return GgufCheckpoint(path)
    folder = resolve_source(source, revision=revision)
    if not _has(folder, SINGLE_NAME, INDEX_NAME):
        if _has(folder, pytorch.SINGLE_NAME, pytorch.INDEX_NAME):
            return pytorch.PytorchCheckpoint(folder)
        if not any(folder.glob(Checkpoint.pattern)):
            return _other_than_safetensors(folder)
    method = registry.method_of(read_config(folder), folder)
    dense = registry.get(method).open_dense(folder, dequantize) if registry.knows(method) else None
    return dense or Checkpoint(folder)


def _has(folder: Path, *names: str) -> bool:
    """Whether one of the names is there, be it a link to nothing: that is a broken source, not one of another kind."""
    return any(os.path.lexists(folder / name) for name in names)


def _other_than_safetensors(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.gguf"))
    if any(folder.glob(pytorch.PytorchCheckpoint.pattern)):
        return pytorch.PytorchCheckpoint(folder)
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:3]) + (", ..." if len(files) > 3 else "")
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files ({names}); name the one to quantize")
    return GgufCheckpoint(files[0], side_folder=folder) if files else Checkpoint(folder)
