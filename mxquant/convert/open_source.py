"""What can be quantized: a model of any kind of file, opened as a :class:`Checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path

from mxquant.checkpoint import pytorch
from mxquant.checkpoint.damage import check_no_adapter
from mxquant.checkpoint.formats import registry
from mxquant.checkpoint.reader import Checkpoint, read_config, resolve_source
from mxquant.checkpoint.weight_files import first_file, is_pytorch
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
    checkpoint = _open_folder(folder)
    check_no_adapter(folder)
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    config = read_config(folder) if _is_there(folder / "config.json") else {}  # which GGUF files do without
    first = first_file(folder, config)
    if first is not None and is_pytorch(first):
        return pytorch.PytorchCheckpoint(folder)
    if first is None and not any(folder.glob(Checkpoint.pattern)):
        return _other_than_safetensors(folder)
    method = registry.method_of(config, folder)
    dense = registry.get(method).open_dense(folder, dequantize) if registry.knows(method) else None
    return dense or Checkpoint(folder)


def _is_there(path: Path) -> bool:
    """Even as a link to nothing: that is a broken source, not one of another kind."""
    return os.path.lexists(path)


def _other_than_safetensors(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.gguf"))
    if any(folder.glob(pytorch.PytorchCheckpoint.pattern)):
        return pytorch.PytorchCheckpoint(folder)
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:3]) + (", ..." if len(files) > 3 else "")
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files ({names}); name the one to quantize")
    return GgufCheckpoint(files[0], side_folder=folder) if files else Checkpoint(folder)
