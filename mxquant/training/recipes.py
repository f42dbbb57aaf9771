"""``TrainingRecipe``: which number formats the three products of each linear layer see.

A linear layer computes ``Y = X W^T`` forward, ``dX = dY W`` (dgrad) and ``dW = dY^T X`` (wgrad) backward.
Weight, activation and gradient take part in two products each; ``LinearFormats`` has a scheme for each
of these six operands. A rounding is part of its scheme. Square tiles are the same numbers whichever way
they are read, so an operand with one tiled scheme for both products is quantized once and its codes
serve both. 1-D blocks lie along the dimension that a product sums over.

The recipes by name. What their sources do not state is our choice, and is marked so.

=================  ===================================================================================
bf16               nothing is quantized: the baseline
mxfp4-1d           blocks of 32 with scales rounded down (floor) and rounding to nearest: the OCP
                   Microscaling v1.0 conversion applied to all three products, naively
mxfp4-1d-tf-sr     the same blocks with truncation-free scales (rceil) and stochastic rounding of
                   gradients: arXiv 2607.24953's recipe without its tiles and its MXFP8 layers
fp4-2d             arXiv 2607.24953: 32 x 32 tiles, truncation-free power-of-two scales, stochastic
                   rounding. Of gradients only: the paper, as far as it could be read, does not say
                   which tensors; arXiv 2509.25149 reports harm on weights and activations
fp4-2d-qk8         the paper's mixed precision: fp4-2d with MXFP8 for the query and key projections.
                   That these are E4M3, rounded to nearest, on the same 32 x 32 tiles is our choice
nvfp4              arXiv 2509.25149: E4M3 scales and one global scale per tensor; weights in 16 x 16
                   tiles, activations and gradients in blocks of 16; stochastic rounding of gradients;
                   a 16-point random Hadamard transform of both operands of wgrad; the first and the
                   last decoder blocks in high precision (one each here; the paper keeps more)
ue5m3-2d           ours: fp4-2d with the scales of arXiv 2601.19026 (UE5M3), rounded up so that nothing
                   saturates. Gradients have a global scale as well: those of a mean over many tokens
                   are far below UE5M3's 2^-17
=================  ===================================================================================

As YAML or JSON, every role's scheme as text (:meth:`mxquant.QuantScheme.parse`), ``high`` for high precision::

    rules:
      - q_proj|k_proj: fp8_e4m3/e8m0/32x32/rceil       # one scheme for every role
      - o_proj: high
    default:
      weight: e8m0/32x32/rceil
      activation: e8m0/32x32/rceil
      gradient: e8m0/32x32/rceil/stochastic            # or {dgrad: ..., wgrad: ...}
    keep_first: 1                                      # decoder blocks in high precision
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme, parse_block

HIGH = "high"
# The products in which each role takes part.
ROLES = {"weight": ("forward", "dgrad"), "activation": ("forward", "wgrad"), "gradient": ("dgrad", "wgrad")}
OPERANDS = tuple(f"{role}_{product}" for role, products in ROLES.items() for product in products)
HADAMARD_POINTS = 16


@dataclass(frozen=True)
class LinearFormats:
    """Schemes of the operands of one linear layer's products; None keeps an operand in high precision.

    ``hadamard``: multiply both operands of wgrad, along the tokens, by a random 16-point Hadamard
    matrix before they are quantized. Raises ``SchemeError`` where that meets tiles.
    """

    weight_forward: QuantScheme | None = None
    weight_dgrad: QuantScheme | None = None
    activation_forward: QuantScheme | None = None
    activation_wgrad: QuantScheme | None = None
    gradient_dgrad: QuantScheme | None = None
    gradient_wgrad: QuantScheme | None = None
    hadamard: bool = False

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            if (scheme := self.scheme(operand)) is not None:
                _ = scheme.text  # is kept from now on; torch.compile cannot look into how it is made
        if self.hadamard and (self.shared("activation") or self.shared("gradient")):
            raise SchemeError(
                "a Hadamard transform of wgrad changes what is quantized there, so tiles that are quantized once "
                "cannot have one; use 1-D blocks for activation and gradient, or no transform"
            )

    @classmethod
    def of(cls, formats: LinearFormats | QuantScheme | str | Mapping[str, Any]) -> LinearFormats:
        """From a scheme (or its text) for every role, or a mapping as in the module's docstring."""
        if isinstance(formats, LinearFormats):
            return formats
        if isinstance(formats, str | QuantScheme):
            formats = dict.fromkeys(ROLES, formats)
        if not isinstance(formats, Mapping):
            raise SchemeError(f"formats {formats!r} must be the text of a scheme or a mapping of {', '.join(ROLES)}")
        _check_keys("role", formats, (*ROLES, "hadamard"))
        schemes: dict[str, QuantScheme | None] = {}
        for role, products in ROLES.items():
            value = formats.get(role, HIGH)
            each = value if isinstance(value, Mapping) else dict.fromkeys(products, value)
            _check_keys(f"product of {role}", each, products)
            schemes |= {f"{role}_{product}": _scheme(each.get(product, HIGH)) for product in products}
        if not any(schemes.values()):
            raise SchemeError(f"a layer with no quantized operand is written {HIGH!r}")
        return cls(**schemes, hadamard=bool(formats.get("hadamard", False)))

    def scheme(self, operand: str) -> QuantScheme | None:
        """The scheme of an operand in ``OPERANDS``."""
        return getattr(self, operand)

    def shared(self, role: str) -> bool:
        """Whether one quantization serves both products: the same square tiles in both."""
        first, second = (self.scheme(f"{role}_{product}") for product in ROLES[role])
        return first is not None and first == second and is_square(first)

    def map(self, change: Callable[[str, QuantScheme], QuantScheme | None]) -> LinearFormats:
        """``change(role, scheme)`` applied to every scheme."""
        changed: dict[str, Any] = {}
        for operand in OPERANDS:
            scheme = self.scheme(operand)
            changed[operand] = None if scheme is None else change(operand.partition("_")[0], scheme)
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """Inverse of :meth:`of`."""
        found: dict[str, Any] = {}
        for role, products in ROLES.items():
            texts = {p: s.text if (s := self.scheme(f"{role}_{p}")) else HIGH for p in products}
            found[role] = texts if len(set(texts.values())) > 1 else texts[products[0]]
        return found | ({"hadamard": True} if self.hadamard else {})


@dataclass(frozen=True)
class TrainingRule:
    """Modules whose name contains a match of ``pattern`` get ``formats``; None keeps them in high precision."""

    pattern: str
    formats: LinearFormats | None

    def __post_init__(self) -> None:
        _compile(self.pattern)


@dataclass(frozen=True)
class TrainingDecision:
    """What a recipe says of one module. ``named``: a rule names it."""

    formats: LinearFormats | None
    reason: str
    named: bool = False


@dataclass(frozen=True)
class TrainingRecipe:
    """Ordered rules, the formats of linear layers that no rule names (None: high precision), and how
    many decoder blocks at either end stay in high precision whatever the rules say."""

    name: str
    default: LinearFormats | None = None
    rules: tuple[TrainingRule, ...] = ()
    keep_first: int = 0
    keep_last: int = 0

    def __post_init__(self) -> None:
        if min(self.keep_first, self.keep_last) < 0:
            raise SchemeError("keep_first and keep_last count decoder blocks and cannot be negative")

    @classmethod
    def of(cls, recipe: TrainingRecipe | str | Path) -> TrainingRecipe:
        """A recipe from itself, its name in ``RECIPES`` or a YAML or JSON file."""
        if isinstance(recipe, TrainingRecipe):
            return recipe
        if str(recipe) in RECIPES:
            return RECIPES[str(recipe)]
        if Path(recipe).suffix.lower() in (".yaml", ".yml", ".json"):
            return cls.from_file(recipe)
        raise SchemeError(
            f"unknown training recipe {str(recipe)!r}; choose from {', '.join(RECIPES)}, or give a YAML file"
        )

    @property
    def quantizes(self) -> bool:
        """Whether there is anything that the recipe would quantize."""
        return self.default is not None or any(rule.formats is not None for rule in self.rules)

    def decide(self, module: str, block: int | None = None, blocks: int = 0) -> TrainingDecision:
        """The formats of a module; ``block`` is the index of its decoder block among ``blocks``."""
        if block is not None and (block < self.keep_first or block >= blocks - self.keep_last):
            return TrainingDecision(None, f"decoder block {block} is kept in high precision", True)
        for rule in self.rules:
            if re.search(rule.pattern, module):
                return TrainingDecision(rule.formats, f"rule {rule.pattern!r}", True)
        return TrainingDecision(self.default, "default" if self.default else "no rule matches")

    def unused_patterns(self, names: Iterable[str]) -> list[str]:
        """Patterns of rules that match none of ``names``."""
        names = list(names)
        return [r.pattern for r in self.rules if not any(re.search(r.pattern, n) for n in names)]

    def override(
        self,
        *,
        name: str | None = None,
        block: int | str | None = None,
        rounding: Mapping[str, str] | None = None,
        scale_rule: str | None = None,
        exclude: Iterable[str] = (),
    ) -> TrainingRecipe:
        """The recipe with parts replaced.

        ``block``: length of every FP4 block, or side of every FP4 tile; ``"16x16"`` or ``"1x16"`` also changes
        which of the two it is. ``rounding``: role -> ``nearest`` or ``stochastic``, of the FP4 operands.
        ``scale_rule``: that of the FP4 operands. ``exclude``: patterns kept in high precision.
        """
        rounding = dict(rounding or {})
        _check_keys("role", rounding, tuple(ROLES))

        def change(role: str, scheme: QuantScheme) -> QuantScheme:
            if scheme.element != "fp4_e2m1":
                return scheme
            return replace(
                scheme,
                block=scheme.block if block is None else _resized(scheme, block),
                rounding=rounding.get(role, scheme.rounding),
                scale_rule=scale_rule or scheme.scale_rule,
            )

        def changed(formats: LinearFormats | None) -> LinearFormats | None:
            return None if formats is None else formats.map(change)

        rules = tuple(TrainingRule(rule.pattern, changed(rule.formats)) for rule in self.rules)
        excluded = tuple(TrainingRule(pattern, None) for pattern in exclude)
        return replace(self, name=name or self.name, default=changed(self.default), rules=excluded + rules)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rules": [{r.pattern: r.formats.to_dict() if r.formats else HIGH} for r in self.rules],
            "default": self.default.to_dict() if self.default else HIGH,
            "keep_first": self.keep_first,
            "keep_last": self.keep_last,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "custom") -> TrainingRecipe:
        """Inverse of :meth:`to_dict`; ``{"recipe": "fp4-2d", ...}`` starts from a recipe by name."""
        if not isinstance(data, Mapping):
            raise SchemeError(f"a training recipe must be a mapping, not {type(data).__name__}")
        _check_keys("recipe key", data, ("recipe", "name", "rules", "default", "keep_first", "keep_last"))
        base = cls.of(data["recipe"]) if "recipe" in data else cls(name)
        rules = data.get("rules") or []
        pairs = [pair for rule in ([rules] if isinstance(rules, Mapping) else rules) for pair in _items(rule)]
        return cls(
            name=str(data.get("name", name)),
            default=_formats(data["default"]) if "default" in data else base.default,
            rules=tuple(TrainingRule(str(p), _formats(value)) for p, value in pairs) + base.rules,
            keep_first=int(data.get("keep_first", base.keep_first)),
            keep_last=int(data.get("keep_last", base.keep_last)),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> TrainingRecipe:
        """Read a YAML or JSON recipe; its name is the file's unless it has one. Raises ``SchemeError``."""
        import yaml

        try:
            return cls.from_dict(yaml.safe_load(Path(path).read_text()), Path(path).stem)
        except OSError as error:
            raise SchemeError(f"cannot read training recipe {path}: {error.strerror}") from error
        except (yaml.YAMLError, json.JSONDecodeError, ValueError) as error:
            raise SchemeError(f"training recipe {path}: {' '.join(str(error).split())}") from error


def weights_as_yaml(recipe: TrainingRecipe, blocks: int) -> str:
    """A recipe for ``mxquant quantize --recipe`` that gives the weights as forward sees them in training.

    ``blocks``: the model's number of decoder blocks. Weights that training rounds stochastically are
    rounded to nearest here, so they are not the same.
    """
    import yaml

    def text(formats: LinearFormats | None) -> str:
        scheme = formats.weight_forward if formats else None
        return replace(scheme, rounding="nearest").text if scheme else "dense"

    kept = sorted({*range(recipe.keep_first), *range(blocks - recipe.keep_last, blocks)})
    rules = [{rf"\.({'|'.join(map(str, kept))})\.": "dense"}] if kept else []
    rules += [{rule.pattern: text(rule.formats)} for rule in recipe.rules]
    return yaml.safe_dump({"rules": rules, "default": text(recipe.default)}, sort_keys=False)


def is_square(scheme: QuantScheme) -> bool:
    """Whether the scheme's blocks are square tiles, the same read by rows or by columns."""
    rows, columns = scheme.block_shape
    return rows == columns


def _resized(scheme: QuantScheme, block: int | str) -> int | tuple[int, int]:
    if isinstance(block, str) and "x" in block.lower():
        return parse_block(block)
    length = parse_block(block)
    assert isinstance(length, int)
    return (length, length) if is_square(scheme) else length


def _scheme(value: Any) -> QuantScheme | None:
    if value is None or value == HIGH:
        return None
    if isinstance(value, QuantScheme):
        return value
    if isinstance(value, str):
        return QuantScheme.parse(value)
    raise SchemeError(f"scheme {value!r} must be a text such as e8m0/32x32/rceil, or {HIGH!r}")


def _formats(value: Any) -> LinearFormats | None:
    return None if value is None or value == HIGH else LinearFormats.of(value)


def _items(rule: Any) -> list[tuple[Any, Any]]:
    if not isinstance(rule, Mapping):
        raise SchemeError(f"recipe rule {rule!r} must look like `pattern: formats`")
    return list(rule.items())


def _check_keys(what: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(map(str, given)) - set(known))
    if unknown:
        raise SchemeError(f"unknown {what} {unknown[0]!r}; choose from {', '.join(known)}")


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise SchemeError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _roles(scheme: str, gradient: str | None = None, **others: Any) -> LinearFormats:
    return LinearFormats.of({"weight": scheme, "activation": scheme, "gradient": gradient or scheme, **others})


_TILES = _roles("e8m0/32x32/rceil", "e8m0/32x32/rceil/stochastic")
_QUERY_AND_KEY = TrainingRule("q_proj|k_proj", _roles("fp8_e4m3/e8m0/32x32/rceil"))

RECIPES: dict[str, TrainingRecipe] = {
    recipe.name: recipe
    for recipe in (
        TrainingRecipe("bf16"),
        TrainingRecipe("mxfp4-1d", _roles("e8m0/32/floor")),
        TrainingRecipe("mxfp4-1d-tf-sr", _roles("e8m0/32/rceil", "e8m0/32/rceil/stochastic")),
        TrainingRecipe("fp4-2d", _TILES),
        TrainingRecipe("fp4-2d-qk8", _TILES, (_QUERY_AND_KEY,)),
        TrainingRecipe(
            "nvfp4",
            LinearFormats.of(
                {
                    "weight": "e4m3+global/16x16/absmax",
                    "activation": "e4m3+global/16/absmax",
                    "gradient": "e4m3+global/16/absmax/stochastic",
                    "hadamard": True,
                }
            ),
            keep_first=1,
            keep_last=1,
        ),
        TrainingRecipe("ue5m3-2d", _roles("ue5m3/32x32/ceil", "ue5m3+global/32x32/ceil/stochastic")),
    )
}
