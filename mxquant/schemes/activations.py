"""``ActivationScheme``: how the inputs of linear layers, or keys and values, are quantized while a model runs.

Plain Python; importing this module does not import torch. The arithmetic is
:func:`mxquant.ops.operators.quantize_activations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme, scheme_fields

NONE, SAME = "none", "same"


@dataclass(frozen=True)
class ActivationScheme:
    """A number format for activations ``[..., features]``, their scales found anew for each input.

    Parameters
    ----------
    scheme : its blocks are 1 x n along the features; its global scale, if any, is one for the whole
        input tensor (the UE4M3-S of arXiv 2601.19026), computed from all of its tokens.
    per_token : a global scale for each token in place of one for all, so that no token's result
        depends on another's.

    As text, a scheme's own (``ue5m3/16``, ``nvfp4``, ``e4m3+global/16``), with ``+token`` in place of
    ``+global`` for one global scale a token. A text or mapping that names no scale rule means
    ``ScaleFormat.plain_rule``, which is ``absmax``, and ``even`` for e8m0: scales are found again for each
    input, and a search would cost several times as much each time. The same holds for ``same``: the format of
    the weight, but not its rule.

    Raises ``SchemeError`` for tiles, which would let tokens see each other, and stochastic rounding.
    """

    scheme: QuantScheme
    per_token: bool = False

    def __post_init__(self) -> None:
        if self.scheme.block_shape[0] > 1:
            raise SchemeError(
                f"activations cannot be quantized in tiles ({self.scheme.block_text}): a tile spans several tokens, "
                f"so that each would see the others; use blocks along the features, e.g. {self.scheme.block_shape[1]}"
            )
        if self.scheme.rounding != "nearest":
            raise SchemeError("activations are rounded to nearest; stochastic rounding is for gradients")
        if self.per_token and not self.scheme.global_scale:
            raise SchemeError(
                f"{self.scheme.text} has no global scale to give to each token; write +token or remove it"
            )

    @classmethod
    def parse(cls, text: str) -> ActivationScheme:
        """Inverse of :attr:`text`."""
        per_token = "+token" in text
        if per_token and "+global" in text:
            raise SchemeError(f"activation scheme {text!r} has a global scale per token and per tensor; choose one")
        return cls.from_dict({"scheme": scheme_fields(text.replace("+token", "+global")), "per_token": per_token})

    @classmethod
    def same_as(cls, weight: QuantScheme) -> ActivationScheme:
        """The format of a layer's weight for its activations, too; with the plain rule, rounding to nearest."""
        return cls(weight.merge(scale_rule=weight.scale_format.plain_rule, rounding="nearest"))

    @property
    def text(self) -> str:
        """Short text such as ``ue5m3/16`` or ``e4m3+token/16/search``; the plain rule is left out."""
        said = self.scheme.scale_rule != self.scheme.scale_format.plain_rule
        # A preset's name does not say that there is a global scale: spell it out.
        text = self.scheme.spelled(rule=said, preset=not self.per_token)
        return text.replace("+global", "+token") if self.per_token else text

    def to_dict(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict(), "per_token": self.per_token}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ActivationScheme:
        """Inverse of :meth:`to_dict`. Raises ``SchemeError`` for fields that do not exist."""
        unknown = set(fields) - {"scheme", "per_token"}
        if unknown or "scheme" not in fields:
            raise SchemeError(f"an activation scheme has the fields scheme and per_token, not {sorted(fields)}")
        scheme = QuantScheme.from_dict(fields["scheme"])
        if fields["scheme"].get("scale_rule") is None:
            scheme = scheme.merge(scale_rule=scheme.scale_format.plain_rule)
        return cls(scheme, bool(fields.get("per_token", False)))

    @classmethod
    def read(cls, value: ActivationScheme | Mapping[str, Any] | str | None) -> ActivationScheme | None:
        """From whatever a file or an option holds: text, ``to_dict()`` form, ``none`` or None."""
        if value is None or value == NONE or isinstance(value, ActivationScheme):
            return None if value == NONE else value  # type: ignore[return-value]
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise SchemeError(f"activation scheme {value!r} must be a text such as ue5m3/16, {NONE!r} or a mapping")
