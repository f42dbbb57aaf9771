"""What a sweep measures: the product of its axes, without the combinations that do not exist.

Plain Python; importing this module does not import torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from mxquant.errors import SchemeError
from mxquant.schemes.activations import NONE, SAME, ActivationScheme
from mxquant.schemes.formats import SCALES, QuantScheme

# Rules with a meaning for every scale: the paper's (arXiv 2601.19026), and mxquant's own choice.
PAPER, DEFAULT = "paper", "default"


@dataclass(frozen=True)
class CellSpec:
    """One combination: the format of the linear weights, and ``inputs``, what happens to their inputs.

    ``inputs`` is ``"none"``, ``"same"`` (as the weights) or the text of an ``ActivationScheme``.
    """

    weights: QuantScheme
    inputs: str = NONE

    @property
    def activations(self) -> ActivationScheme | None:
        """How inputs are quantized. Raises ``SchemeError`` for tiles, which inputs cannot have."""
        return ActivationScheme.same_as(self.weights) if self.inputs == SAME else ActivationScheme.read(self.inputs)

    @property
    def scale(self) -> str:
        """The scale as a user types it: ``e4m3+global``."""
        return self.weights.scale_text

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        rows, columns = self.weights.block_shape
        return rows * columns

    @property
    def is_tile(self) -> bool:
        return self.weights.block_shape[0] > 1

    @property
    def text(self) -> str:
        """All of it, e.g. ``e4m3/8/absmax`` or ``e4m3/8/absmax, activations same``."""
        weights = self.weights.spelled(rule=True, preset=False)
        return weights if self.inputs == NONE else f"{weights}, activations {self.inputs}"

    def to_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.to_dict(), "inputs": self.inputs}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CellSpec:
        return cls(QuantScheme.from_dict(fields["weights"]), fields["inputs"])


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep.

    Attributes
    ----------
    scales : names of ``SCALES``, with ``+global`` for a global scale.
    blocks : lengths along the input features, or tiles ``(rows, columns)`` (weights only).
    rules : scale rules; ``"paper"`` is absmax, and even for e8m0; ``"default"`` each scale's own.
    elements : names of ``ELEMENTS``.
    inputs : see :class:`CellSpec`.

    Raises ``SchemeError`` for names that do not exist.
    """

    scales: tuple[str, ...]
    blocks: tuple[int | tuple[int, int], ...]
    rules: tuple[str, ...] = (PAPER,)
    elements: tuple[str, ...] = ("fp4_e2m1",)
    inputs: tuple[str, ...] = (NONE,)

    def __post_init__(self) -> None:
        known = {PAPER, DEFAULT, *itertools.chain(*(fmt.rules for fmt in SCALES.values()))}
        for rule in self.rules:
            if rule not in known:
                raise SchemeError(f"unknown scale rule {rule!r}; choose from {', '.join(sorted(known))}")
        for scale in self.scales:
            name, _, rest = scale.partition("+")
            if name not in SCALES or rest not in ("", "global"):
                raise SchemeError(f"unknown scale {scale!r}; choose from {', '.join(SCALES)}, optionally with +global")
        for element, block in itertools.product(self.elements, self.blocks):
            QuantScheme(element, block=block)
        for text in self.inputs:
            if text != SAME:
                ActivationScheme.read(text)

    def cells(self) -> tuple[list[CellSpec], list[str]]:
        """Every combination that exists, and a note on each kind that does not."""
        found: dict[CellSpec, None] = {}
        skipped: defaultdict[str, list[str]] = defaultdict(list)
        for inputs, element, scale, rule in itertools.product(self.inputs, self.elements, self.scales, self.rules):
            name, _, has_global = scale.partition("+")
            actual = {PAPER: SCALES[name].plain_rule, DEFAULT: SCALES[name].default_rule}.get(rule, rule)
            if actual not in SCALES[name].rules:
                _append_new(skipped[f"scale rule {rule} does not exist for"], scale)
                continue
            try:
                base = QuantScheme(element, name, 16, bool(has_global), actual)
            except SchemeError:  # the one rule that knows one element only
                _append_new(skipped[f"scale rule {rule} does not exist for"], element)
                continue
            for block in self.blocks:
                spec = CellSpec(replace(base, block=block), inputs)
                if spec.is_tile and inputs != NONE:
                    what = "activations cannot be quantized in tiles (a token would see others); weights only for"
                    _append_new(skipped[what], spec.weights.block_text)
                else:
                    found[spec] = None
        return list(found), [f"{what} {', '.join(names)}" for what, names in skipped.items()]


def _append_new(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


@dataclass(frozen=True)
class Preset:
    """A published study: its grid and how it measured. ``windows`` None: the whole text."""

    grid: Grid
    text: str
    seq_len: int
    windows: int | None = None


PRESETS = {
    # Formats, rule, text, window length and what is quantized are the paper's; that blocks go from
    # 2 to 256 covers its figures.
    "is-finer-better": Preset(
        Grid(
            scales=("e4m3", "e4m3+global", "ue5m3", "bf16"),
            blocks=(2, 4, 8, 16, 32, 64, 128, 256),
            inputs=(NONE, SAME),
        ),
        text="wikitext2",
        seq_len=2048,
    ),
}
