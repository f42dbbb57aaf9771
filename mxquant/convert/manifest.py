"""``Manifest``: which shards of an output are finished, and of which source and recipe they are.

It lies in the work folder beside the model. A killed run is resumed from it, shard by shard: finished
ones are kept, the others are written again. What is not finished is never trusted, so any moment is a
good one to be killed at. ::

    {"format_version": 1,
     "identity": {"source": {...}, "recipe": {...}, "settings": {...}, "versions": {...}, "shards": {...}},
     "finished": {"model-00001-of-00009.safetensors": {"bytes": ..., "mtime_ns": ..., "stats": {...}}}}

``identity`` is all that the bytes of the output depend on; a run that differs in any of it is refused.
A shard is listed only after it is on the disk, for its own process and for the computer may die. It
counts as finished while its size, its header and the time of its last change are what they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxquant.checkpoint.layout import OutputTensor
from mxquant.checkpoint.writer import shard_header, shard_names
from mxquant.codec.rounding import QuantStats
from mxquant.convert.plan import QuantPlan
from mxquant.convert.work_folder import WorkFolder, remove
from mxquant.errors import CheckpointError

FORMAT_VERSION = 1
_NAME = "manifest.json"
_SECTIONS = ("source", "recipe", "settings", "versions", "shards")

Identity = dict[str, dict[str, Any]]


def identify(
    source: dict[str, dict[str, Any]], plan: QuantPlan, settings: dict[str, Any], versions: dict[str, str]
) -> Identity:
    """All that the bytes of an output depend on, in the words that a user knows them by.

    ``source``: what :func:`mxquant.checkpoint.fingerprint.fingerprint` says of it.
    """
    recipe = {t.name: f"{t.scheme.text if t.scheme else 'dense'} ({t.reason})" for t in plan.tensors}
    recipe |= {"activations": plan.activations, "KV cache": plan.kv_cache}
    first = {name: shard[0].name for name, shard in zip(shard_names(len(plan.shards)), plan.shards, strict=True)}
    found = (source, recipe, {"format on disk": plan.on_disk, **settings}, versions, first)
    return dict(zip(_SECTIONS, found, strict=True))


class Manifest:
    """The manifest in a work folder. ``finished``: statistics of the tensors in each finished shard.

    ``changed``: shards that were finished, and were then changed by somebody.
    """

    def __init__(self, path: Path, identity: Identity):
        self._path, self._identity = path, identity
        self._records: dict[str, dict[str, Any]] = {}
        self.changed: list[str] = []

    @classmethod
    def start(cls, work: WorkFolder, identity: Identity, plan: QuantPlan, *, resume: bool, overwrite: bool) -> Manifest:
        """Take up what is in the work folder if ``resume``, else clear it; leaves finished shards only.

        Raises ``CheckpointError`` if there is something to resume that belongs to another source or
        recipe, and if there is something that ``resume`` did not ask for and ``overwrite`` does not
        give up.
        """
        manifest = cls(work.path / _NAME, identity)
        shards = dict(zip(shard_names(len(plan.shards)), plan.shards, strict=True))
        if resume:
            manifest._take_up(work.model, shards)
        elif not overwrite and (count := finished_shards(work.path)):
            raise CheckpointError(
                f"{work.path} holds an interrupted run with {count} finished shard{'s' * (count > 1)}; --resume "
                "continues it, --overwrite starts over"
            )
        if not manifest._records:
            work.clear()
        work.model.mkdir(exist_ok=True)
        _remove_all_but(work.model, manifest._records)
        manifest._write()
        return manifest

    @property
    def finished(self) -> dict[str, dict[str, QuantStats]]:
        return {
            file: {name: QuantStats(**fields) for name, fields in record["stats"].items()}
            for file, record in self._records.items()
        }

    def summary(self) -> str:
        """A sentence on what is resumed."""
        count, total = len(self._records), len(self._identity["shards"])
        if not self._records and not self.changed:
            return f"Nothing to resume in {self._path.parent}; starting over."
        changed = f"; written again: {', '.join(self.changed)}, changed since" if self.changed else ""
        return f"Resuming: {count} of {total} shards are finished{changed}."

    def add(self, file: Path, stats: dict[str, QuantStats]) -> None:
        """List a shard as finished, once the disk has it."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        fields = {name: asdict(found) for name, found in stats.items()}
        self._records[file.name] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "stats": fields}
        self._write()

    def _take_up(self, model: Path, shards: dict[str, list[OutputTensor]]) -> None:
        found = _read(self._path)
        if found is None:
            return
        difference = _difference(found["identity"], json.loads(json.dumps(self._identity)))
        if difference:
            raise CheckpointError(
                f"cannot resume {self._path.parent}: {difference}; undo that, or start over with --overwrite "
                "instead of --resume"
            )
        for name, record in found["finished"].items():
            if name in shards and _is_intact(model / name, record, shards[name]):
                self._records[name] = record
            else:
                self.changed.append(name)

    def _write(self) -> None:
        data = {"format_version": FORMAT_VERSION, "identity": self._identity, "finished": self._records}
        temporary = self._path.with_name(f"{_NAME}.partial")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def finished_shards(work: Path) -> int:
    """How many shards the manifest in a work folder lists. Raises ``CheckpointError`` if it is broken."""
    found = _read(work / _NAME)
    return len(found["finished"]) if found else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {data['format_version']}")
        if not all(isinstance(data["identity"][section], dict) for section in _SECTIONS):
            raise ValueError("identity")
        for record in data["finished"].values():
            for stats in record["stats"].values():
                QuantStats(**stats)
            record["bytes"], record["mtime_ns"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}); start over with --overwrite instead of --resume"
        ) from error
    return data


def _is_intact(file: Path, record: dict[str, Any], tensors: list[OutputTensor]) -> bool:
    try:
        status = file.stat()
        if (status.st_size, status.st_mtime_ns) != (record["bytes"], record["mtime_ns"]):
            return False
        header, _ = shard_header(tensors)
        with open(file, "rb") as shard:
            return shard.read(len(header)) == header
    except FileNotFoundError:
        return False


def _remove_all_but(model: Path, names: Iterable[str]) -> None:
    """The shard that a killed run was writing."""
    for entry in model.iterdir():
        if entry.name not in names:
            remove(entry)


def _difference(old: Identity, new: Identity) -> str | None:
    """What has changed first, in words; None if nothing has."""
    for section in _SECTIONS:
        for key in {**old[section], **new[section]}:
            was, now = old[section].get(key), new[section].get(key)
            if was != now:
                return _in_words(section, key, was, now)
    return None


def _in_words(section: str, key: str, was: Any, now: Any) -> str:
    if section == "source":
        what = "is new" if was is None else "is gone" if now is None else "has changed"
        return f"the source's {key} {what}"
    if section == "shards":
        return "--max-shard-size has changed"
    name = {"versions": f"the version of {key}", "settings": key}.get(section, f"the recipe: {key}")
    return f"{name} was {was}, is {now}"
