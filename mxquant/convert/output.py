"""Writing an output folder atomically: it is complete or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mxquant.checkpoint.layout import OutputTensor
from mxquant.checkpoint.reader import Checkpoint
from mxquant.checkpoint.writer import ShardWriter
from mxquant.convert.work_folder import partial_folder, work_folder
from mxquant.errors import CheckpointError

_COPY_BYTES = 1 << 24


def check_output(out: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    """Raise ``CheckpointError`` if the output folder cannot be written without losing something."""
    source = checkpoint.source
    if out.resolve() == source.resolve():
        raise CheckpointError(f"output and source are the same folder, {out}; choose another --out")
    if out.resolve() in source.resolve().parents or source.resolve() in out.resolve().parents:
        raise CheckpointError(f"output {out} and source {source} lie in one another; choose another --out")
    _check_links(out, checkpoint)
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} exists and is not a folder; choose another --out")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{out} exists and is not empty; choose another --out, or pass --overwrite")
    if not (out / "config.json").exists():
        raise CheckpointError(f"{out} is not empty and holds no model; --overwrite replaces model folders only")


def _check_links(out: Path, checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError`` if a file of the source is really one in the output folder, or in what is built."""
    replaced = [folder for folder in (out, partial_folder(out)) if folder.exists()]
    if not replaced:
        return
    for file in checkpoint.files():
        real = file.resolve()
        for folder in replaced:
            if real.is_relative_to(folder.resolve()):
                raise CheckpointError(
                    f"{file} of the source is a link to {real}, which the output {out} would replace; "
                    "choose another --out"
                )


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise ``CheckpointError`` if the file system of ``folder`` has less than ``needed`` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{folder}: the output needs {needed / 1e9:.2f} GB, only {free / 1e9:.2f} GB are free")


@contextmanager
def output_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` if the block succeeds and vanishes if it fails.

    Raises ``CheckpointError`` that names ``out`` for whatever the operating system refuses, such as a full disk.
    """
    with work_folder(out) as work:
        try:
            work.clear()
            work.model.mkdir()
            yield work.model
            work.publish()
        finally:
            work.clear()


@contextmanager
def open_shard(path: Path, tensors: list[OutputTensor]) -> Iterator[ShardWriter]:
    """A shard writer that finishes if the block succeeds and removes its file if it fails."""
    writer = ShardWriter(path, tensors)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def carry_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer, templates, custom code and whatever else lies beside the weights."""
    for relative in checkpoint.side_files().carried:
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            source = open(checkpoint.folder / relative, "rb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise CheckpointError(f"{checkpoint.folder / relative} cannot be read: {error.strerror}") from error
        with source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)


def copy_tensor(checkpoint: Checkpoint, name: str, writer: ShardWriter) -> None:
    """Copy a tensor's bytes as they are."""
    data = checkpoint.read(name).reshape(-1).view(torch.uint8)
    for offset in range(0, data.numel(), _COPY_BYTES):
        writer.write(name, data[offset : offset + _COPY_BYTES], offset)
