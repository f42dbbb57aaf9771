"""``QuantRecipe``: which scheme each weight of a model gets, as ordered rules.

A rule is a regular expression, searched for in a module's name (``model.layers.0.mlp.up_proj``), and
a scheme or ``dense``; the first rule that matches decides. As YAML::

    rules:
      - q_proj|k_proj: mxfp8                      # a preset
      - o_proj: e4m3+global/8                     # or any scheme as text, see QuantScheme.parse
      - 'layers\\.(0|31)\\.': dense                # kept in high precision
      - down_proj: {scale: ue5m3, block: 8}       # a scheme, unnamed fields at their defaults
      - lm_head: {preset: nvfp4, block: 8}        # changes of a preset, see QuantScheme.merge
    default: {scale: ue5m3, block: 16}            # linear layers that no rule names

Without rules on top, the mapping itself is taken as the rules: ``q_proj|k_proj: mxfp8``. ``include``
narrows quantization to the modules that match one of its patterns; ``exclude`` keeps modules dense.
``activations`` is ``none``, ``same`` (each layer's inputs in the format of its weight) or a scheme
such as ``e4m3+token/16``; ``kv_cache`` is ``none`` or a scheme. Their scale rules are those of
:class:`mxquant.schemes.activations.ActivationScheme`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxquant.errors import SchemeError
from mxquant.schemes.activations import NONE, SAME, ActivationScheme
from mxquant.schemes.formats import QuantScheme

DENSE = "dense"
_KEYS = ("rules", "default", "include", "exclude", "activations", "kv_cache")


@dataclass(frozen=True)
class Rule:
    """Modules whose name contains a match of ``pattern`` get ``scheme``; None keeps them dense."""

    pattern: str
    scheme: QuantScheme | None

    def __post_init__(self) -> None:
        _compile(self.pattern)

    def matches(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True)
class Decision:
    """What a recipe says of one module. ``named``: a rule or include pattern names it."""

    scheme: QuantScheme | None
    reason: str
    named: bool


@dataclass(frozen=True)
class QuantRecipe:
    """Ordered rules, a default scheme for linear layers (None: dense), include and exclude patterns.

    ``activations`` (``"same"``: as each layer's weight): for the inputs of quantized layers;
    ``kv_cache``: for keys and values. None leaves them as they are.
    """

    rules: tuple[Rule, ...] = ()
    default: QuantScheme | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    activations: ActivationScheme | str | None = None
    kv_cache: ActivationScheme | None = None

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            _compile(pattern)
        if self.activations != SAME:
            object.__setattr__(self, "activations", ActivationScheme.read(self.activations))
        object.__setattr__(self, "kv_cache", ActivationScheme.read(self.kv_cache))
        if self.kv_cache and self.kv_cache.scheme.global_scale and not self.kv_cache.per_token:
            raise SchemeError(
                f"a KV cache cannot have one global scale for all tokens ({self.kv_cache.text}): tokens arrive one "
                "by one; write +token instead of +global, or remove it"
            )
        for scheme in self.schemes:
            self.activations_for(scheme)

    @classmethod
    def of(cls, scheme: QuantScheme | QuantRecipe | str) -> QuantRecipe:
        """A recipe from a recipe, a scheme or the text of one (:meth:`mxquant.QuantScheme.parse`)."""
        if isinstance(scheme, QuantRecipe):
            return scheme
        return cls(default=QuantScheme.parse(scheme) if isinstance(scheme, str) else scheme)

    @property
    def schemes(self) -> list[QuantScheme]:
        """Every scheme that the recipe may hand out."""
        found = [r.scheme for r in self.rules if r.scheme is not None]
        return list(dict.fromkeys([*found, *([self.default] if self.default else [])]))

    def activations_for(self, weight: QuantScheme) -> ActivationScheme | None:
        """What the inputs of a layer with this weight are quantized to."""
        if self.activations == SAME:
            return ActivationScheme.same_as(weight)
        assert not isinstance(self.activations, str)
        return self.activations

    def decide(self, name: str) -> Decision:
        for pattern in self.exclude:
            if re.search(pattern, name):
                return Decision(None, f"excluded by {pattern!r}", True)
        included = next((p for p in self.include if re.search(p, name)), None)
        if self.include and included is None:
            return Decision(None, "not included", True)
        for rule in self.rules:
            if rule.matches(name):
                reason = f"rule {rule.pattern!r}"
                return Decision(rule.scheme, reason if rule.scheme else f"kept dense by {reason}", True)
        if included is not None and self.default is not None:
            return Decision(self.default, f"included by {included!r}", True)
        return Decision(self.default, "default" if self.default else "no rule matches", False)

    @property
    def quantizing_patterns(self) -> list[str]:
        """The patterns of rules and include that have a module quantized."""
        return [r.pattern for r in self.rules if r.scheme is not None] + list(self.include)

    @property
    def dense_patterns(self) -> list[str]:
        """The patterns of rules and exclude that keep a module dense."""
        return [r.pattern for r in self.rules if r.scheme is None] + list(self.exclude)

    def unused_patterns(self, names: Sequence[str]) -> list[str]:
        """The patterns of rules, include and exclude that match none of ``names``."""
        patterns = [r.pattern for r in self.rules] + list(self.include) + list(self.exclude)
        return [p for p in patterns if not any(re.search(p, n) for n in names)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rules": [{r.pattern: r.scheme.to_dict() if r.scheme else DENSE} for r in self.rules],
            "default": self.default.to_dict() if self.default else DENSE,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "activations": activations_text(self.activations),
            "kv_cache": activations_text(self.kv_cache),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantRecipe:
        """Inverse of :meth:`to_dict`; also takes the short forms shown in the module docstring."""
        if not isinstance(data, Mapping):
            raise SchemeError(f"a recipe must be a mapping of patterns to schemes, not {type(data).__name__}")
        if "rules" not in data and "default" not in data:
            data = {"rules": data}
        unknown = set(data) - set(_KEYS)
        if unknown:
            raise SchemeError(f"unknown recipe key {sorted(unknown)[0]!r}; choose from {', '.join(_KEYS)}")
        default = data.get("default", DENSE)
        return cls(
            rules=tuple(Rule(str(pattern), _scheme(value)) for pattern, value in _pairs(data.get("rules") or [])),
            default=_scheme(default),
            include=_patterns("include", data.get("include") or []),
            exclude=_patterns("exclude", data.get("exclude") or []),
            activations=data.get("activations"),
            kv_cache=data.get("kv_cache"),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> QuantRecipe:
        """Read a YAML or JSON recipe. Raises ``SchemeError`` that names the file."""
        import yaml

        try:
            data = yaml.safe_load(Path(path).read_text())
            return cls.from_dict(data)
        except OSError as error:
            raise SchemeError(f"cannot read recipe {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SchemeError(f"recipe {path} is not UTF-8 (byte {error.start})") from error
        except RecursionError as error:
            raise SchemeError(f"recipe {path} nests without end") from error
        except (yaml.YAMLError, SchemeError) as error:
            raise SchemeError(f"recipe {path}: {' '.join(str(error).split())}") from error


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    """Pattern and scheme of each rule, of a list of mappings or one mapping."""
    if isinstance(rules, Mapping):
        return list(rules.items())
    if not isinstance(rules, Sequence):
        raise SchemeError(f"recipe rules {rules!r} must be a list of `pattern: scheme`")
    for rule in rules:
        if not isinstance(rule, Mapping):
            raise SchemeError(f"recipe rule {rule!r} must look like `pattern: scheme`")
    return [pair for rule in rules for pair in rule.items()]


def _patterns(key: str, patterns: Any) -> tuple[str, ...]:
    """``include`` or ``exclude``: one pattern or a list."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SchemeError(f"recipe key {key} must be a pattern or a list of patterns, not {patterns!r}")
    return tuple(patterns)


def _scheme(value: Any) -> QuantScheme | None:
    if value is None or value == DENSE:
        return None
    if isinstance(value, QuantScheme):
        return value
    if isinstance(value, str):
        return QuantScheme.parse(value)
    if isinstance(value, Mapping):
        return QuantScheme.from_dict(value)
    raise SchemeError(f"scheme {value!r} must be a text such as ue5m3/16, {DENSE!r} or a mapping of scheme fields")


def activations_text(value: ActivationScheme | str | None) -> str:
    """``none``, ``same`` or the text of the scheme."""
    return value.text if isinstance(value, ActivationScheme) else value or NONE


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise SchemeError(f"pattern {pattern!r} is not a regular expression: {error}") from error
