"""Words for files and folders that are not what they should be: what they are instead, and the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mxquant.errors import CheckpointError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
# How downloads are called that are not finished: by the hub's client, browsers, wget and aria2.
_UNFINISHED = (".incomplete", ".part", ".crdownload", ".download", ".aria2", ".tmp")
_GIT_LFS = b"version https://git-lfs"
_WEB_PAGE = (b"<!doctype", b"<html", b"<?xml")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<kind>\w+)")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``CheckpointError`` that names it; ``FileNotFoundError`` if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link to nothing; download the model again") from None
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: not valid JSON (nested without end)") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {what_file(path) or f'not valid JSON ({error})'}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: a {type(data).__name__}, not a JSON object")
    return data


def why_not_whole(path: Path, error: Exception) -> str:
    """What is wrong with a weight file that a library could not open."""
    return what_file(path) or " ".join(str(error).split()).removeprefix("Error while deserializing header: ")


def what_file(path: Path) -> str | None:
    """What a file is, if that can be seen from its first bytes, and what to do about it."""
    try:
        if path.is_dir():
            return "it is a folder"
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not start:
        return "it is empty; download it again"
    if start.startswith(_GIT_LFS):
        return "it is a pointer of git-lfs, not the file itself; get that with `git lfs pull`"
    if start.lstrip().lower().startswith(_WEB_PAGE):
        return "it is a web page; download the file itself"
    return None


def incomplete_set(files: Iterable[Path]) -> str | None:
    """The first file that is missing of those that are numbered ``model-00001-of-00003.safetensors``."""
    names = {file.name for file in files}
    for name in sorted(names):
        found = _SHARD.fullmatch(name)
        if found is not None:
            count = int(found["count"])
            members = (f"{found['stem']}-{i:05d}-of-{found['count']}.{found['kind']}" for i in range(1, count + 1))
            lost = next((member for member in members if member not in names), None)
            if lost is not None:
                return lost
    return None


def what_instead(folder: Path) -> str | None:
    """What a folder without a model in it holds, and the way out."""
    if (folder / ADAPTER_CONFIG).exists() or (folder / ADAPTER_WEIGHTS).exists():
        return (
            "it holds an adapter (PEFT) and no model: merge that into its base model (merge_and_unload), "
            "save the result with save_pretrained and name its folder"
        )
    unfinished = next((p.name for p in sorted(folder.iterdir()) if p.name.endswith(_UNFINISHED)), None)
    if unfinished is not None:
        return f"{unfinished} is a download that was not finished; download the model again"
    return None


def check_no_adapter(folder: Path) -> None:
    """Raise ``CheckpointError`` if transformers loads the model of a folder together with an adapter (PEFT).

    It does so wherever there is an ``adapter_config.json``, and fails where the adapter's weights are not there.
    Without that file it ignores them.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    there = [name for name in _ADAPTER_FILES if (folder / name).exists()]
    weights = "" if len(there) > 1 else ", whose weights are not there"
    merge = "merge it into the model with PEFT (merge_and_unload) and save the result, or " if len(there) > 1 else ""
    raise CheckpointError(
        f"{folder} holds an adapter beside the model ({ADAPTER_CONFIG}){weights}, which transformers adds as it loads; "
        f"{merge}remove {' and '.join(there)} to take the model alone"
    )
