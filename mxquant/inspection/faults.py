"""What can be wrong with a checkpoint: kinds of faults, and the exit code of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A class of faults. Where there are several, the first in :data:`KINDS` gives the exit code."""

    code: int
    what: str


KINDS = {
    "files": Kind(10, "a file is missing, cut short or damaged, or the index is not that of the files"),
    "config": Kind(11, "config, files and model disagree on what there is and what is packed"),
    "shapes": Kind(12, "a tensor is not of the shape or dtype that config and model ask for"),
    "scales": Kind(13, "a scale is NaN, infinite or negative, or zero where its elements are not"),
    "values": Kind(14, "an element code is NaN or lies in the padding; a dense value is not finite"),
    "groups": Kind(15, "projections that engines fuse have different global scales"),
    "tied": Kind(16, "a tied weight is stored twice"),
    "dense": Kind(17, "a dense tensor is not the source's, byte for byte"),
    "weights": Kind(18, "packed weights are not what the source and the report say"),
    "load": Kind(19, "transformers cannot load it, or what it loads differs from the files"),
}


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, and a sentence that names the tensor or file."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Verification:
    """What :func:`mxquant.inspection.verify.verify_checkpoint` found.

    ``warnings``: what is not wrong but may matter; ``checked``: what was looked at, with counts.
    """

    path: str
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checked: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, message: str) -> None:
        fault = Fault(kind, message)
        if fault not in self.faults:  # two checks may come upon the same
            self.faults.append(fault)

    @property
    def exit_code(self) -> int:
        found = {fault.kind for fault in self.faults}
        return next((kind.code for name, kind in KINDS.items() if name in found), 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "ok": not self.faults,
            "exit_code": self.exit_code,
            "faults": [{"kind": f.kind, "message": f.message} for f in self.faults],
            "warnings": self.warnings,
            "checked": self.checked,
        }
