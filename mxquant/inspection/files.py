"""Whether the files of a checkpoint are whole, and the index is theirs. Reads headers only, and trusts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mxquant.checkpoint.damage import check_no_adapter
from mxquant.checkpoint.headers import HeaderError, TensorInfo, read_header
from mxquant.checkpoint.layout import INDEX_NAME, SINGLE_NAME
from mxquant.checkpoint.weight_files import first_file, is_index, is_pytorch, precedence
from mxquant.errors import CheckpointError
from mxquant.inspection.faults import Verification


def check_files(folder: Path, found: Verification) -> None:
    """Add the faults of the files in ``folder``: every one of them, not the first alone."""
    config = _read_json(folder / "config.json", found) or {}
    shards = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    try:
        first = first_file(folder, config)
    except CheckpointError as error:
        found.add("files", str(error))
        return
    try:
        check_no_adapter(folder)
    except CheckpointError as error:  # transformers fails without the adapter's weights, and adds those that are there
        whole = any(folder.glob("adapter_model.*"))
        found.warnings.append(str(error)) if whole else found.add("config", str(error))
    if first is None or is_pytorch(first):
        first = None
        there = f"only {', '.join(p.name for p in shards[:3])}" if shards else "no safetensors files at all"
        found.add("files", f"neither {SINGLE_NAME} nor {INDEX_NAME} is there, {there}")
    elif sentence := precedence(folder, first):
        found.warnings.append(sentence)
    index = _read_json(folder / first, found) if first is not None and is_index(first) else None
    used = _shards_of(first, index, folder, shards, found)
    headers = {path.name: _read_header(path, found) for path in used}
    _check_duplicates(headers, found)
    if index is not None:
        _check_index(str(first), index, headers, found)
    found.checked["files"] = len(used)
    for path in shards:
        if path not in used:
            found.warnings.append(f"{path.name} is not read; loaders start from {first}")
    for path in sorted(folder.glob("*.partial")):
        found.warnings.append(f"{path.name} is left from a run that was interrupted")


def _shards_of(
    first: str | None, index: dict[str, Any] | None, folder: Path, shards: list[Path], found: Verification
) -> list[Path]:
    """The files that a loader reads."""
    if index is None:
        return shards if first is None or is_index(first) else [folder / first]
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        found.add("files", f"{first} has no weight_map of tensor and file names")
        return shards
    used = []
    for name in dict.fromkeys(mapping.values()):
        if (folder / name).is_file() and Path(name).name == name:
            used.append(folder / name)
        else:
            found.add("files", f"{name} is in {first} but not in the folder")
    return used


def _check_index(
    first: str, index: dict[str, Any], headers: dict[str, dict[str, TensorInfo]], found: Verification
) -> None:
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict):
        return
    for name, file in mapping.items():
        if file in headers and name not in headers[file]:
            found.add("files", f"{first} says that {name} is in {file}, and it is not")
    for file, header in headers.items():
        for name in header:
            if name not in mapping:
                found.add("files", f"{name} is in {file}, and {first} does not say so")
    total = (index.get("metadata") or {}).get("total_size")
    size = sum(info.nbytes for header in headers.values() for info in header.values())
    if isinstance(total, int) and total != size and not found.faults:  # no loader looks at it
        found.warnings.append(f"{first} says {total} bytes in all, the files hold {size}")


def _check_duplicates(headers: dict[str, dict[str, TensorInfo]], found: Verification) -> None:
    first: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in first:
                found.add("files", f"{name} is in {first[name]} and again in {file}")
            first.setdefault(name, file)


def _read_json(path: Path, found: Verification) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        found.add("files", f"{path.name} is missing")
        return None
    except (OSError, ValueError, RecursionError) as error:
        found.add("files", f"{path.name} cannot be read: {error}")
        return None
    if not isinstance(data, dict):
        found.add("files", f"{path.name} is not a JSON object")
        return None
    return data


def _read_header(path: Path, found: Verification) -> dict[str, TensorInfo]:
    """Tensor name -> entry; empty, with a fault, where the file is not whole."""
    try:
        return read_header(path)
    except HeaderError as error:
        found.add("files", f"{path.name} {error}")
        return {}
