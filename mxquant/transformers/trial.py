"""Would a checkpoint that is not written yet load? Its own loader is asked, with the headers alone.

``from_pretrained`` is run on a file that has the planned header and, where the weights will be, a hole: no disk
and no memory. Weights go to the meta device. So the loader's own matching of names, its conversions, ties and
initialization decide, whatever the architecture and the version of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoint.layout import SINGLE_NAME, OutputTensor
from mxquant.checkpoint.weight_files import CONFIG_KEY
from mxquant.checkpoint.writer import shard_bytes, shard_header
from mxquant.errors import CheckpointError
from mxquant.transformers.architectures import first_line, kept_in_fp32, silent
from mxquant.transformers.behaviour import why_not_running


def why_not_loadable(
    model: Any,
    tensors: Sequence[OutputTensor],
    quantization: dict[str, Any],
    source: Sequence[OutputTensor],
    *,
    dtype: torch.dtype | None = None,
    run: bool = False,
) -> str | None:
    """Why the class of ``model`` would not load a checkpoint as planned; None if it would.

    ``tensors``: all that the files will hold; ``quantization``: the ``quantization_config``; ``source``: the
    tensors of the dense checkpoint. What the loader misses or ignores in that is no obstacle. ``dtype``: what the
    model is loaded in, if not what its config says. ``run``: whether what was loaded must also run without numbers,
    as the dense model does.
    """
    name = type(model).__name__
    try:
        loaded, missing, ignored = _load(model, tensors, quantization, dtype)
    except _NotLoadedError as error:
        return f"transformers cannot load {name} from it: {error}"
    if run and (why := why_not_running(loaded)):
        return f"{name} does not run with packed weights: {why}"
    if dtype is not None and (left := _not_in(dtype, loaded, model)):
        short = str(dtype).removeprefix("torch.")
        return f"transformers would load {name} in {short} and leave {_some(left)} as it is in the files"
    if not missing and not ignored:
        return None
    _, known_missing, known_ignored = _load(model, source, None)
    if lost := missing - known_missing:
        return f"transformers would not find {_some(lost)} of {name} in it"
    if lost := ignored - known_ignored:
        return f"transformers would ignore {_some(lost)} of it, so the weights of {name} would be wrong"
    return None


def _load(
    model: Any, tensors: Sequence[OutputTensor], quantization: dict[str, Any] | None, dtype: torch.dtype | None = None
) -> tuple[Any, set[str], set[str]]:
    """The model on the meta device, what the loader misses and what it ignores."""
    config = copy.deepcopy(model.config)
    vars(config).pop(CONFIG_KEY, None)  # a file of the source
    if dtype is not None:
        config.dtype = dtype
    if quantization is not None:
        config.quantization_config = copy.deepcopy(quantization)
    with tempfile.TemporaryDirectory() as folder, quiet():
        _write_hole(Path(folder), list(tensors))
        try:
            loaded, info = type(model).from_pretrained(
                folder, config=config, device_map={"": "meta"}, output_loading_info=True, local_files_only=True
            )
        except Exception as error:  # of a loader that does not know what to do with the files, anything
            raise _NotLoadedError(first_line(error)) from error
    return loaded, set(info["missing_keys"]), set(info["unexpected_keys"])


def _not_in(dtype: torch.dtype, loaded: Any, model: Any) -> set[str]:
    """Parameters of the dense model that were loaded in another dtype, though the model's class does not ask for it."""
    kept, known = kept_in_fp32(model), {name for name, _ in model.named_parameters()}
    found = [(name, p) for name, p in loaded.named_parameters() if name in known and p.is_floating_point()]
    return {name for name, p in found if p.dtype != dtype and not kept(name)}


class _NotLoadedError(Exception):
    """The loader failed."""


def _write_hole(folder: Path, tensors: list[OutputTensor]) -> None:
    try:
        with open(folder / SINGLE_NAME, "wb") as file:
            file.write(shard_header(tensors)[0])
            file.truncate(shard_bytes(tensors))
        with open(folder / "config.json", "w") as file:
            file.write("{}")  # looked into for how to generate
    except OSError as error:
        raise CheckpointError(f"cannot write a temporary file in {folder.parent}: {error.strerror}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of loaders."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            from loguru import logger  # what compressed-tensors logs with

            logger.disable("compressed_tensors")
            stack.callback(logger.enable, "compressed_tensors")
        stack.enter_context(silent())
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")
