"""``ActivationScheme``: how the inputs of linear layers, or keys and values, are quantized while a model runs.

Plain Python; importing this module does not import torch. The arithmetic is
:func:`mxquant.ops.operators.quantize_activations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme

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
    ``+global`` for one global scale a token.

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
            raise SchemeError(f"{self.scheme.text} has no global scale to give to each token; write +token or drop it")

    @classmethod
    def parse(cls, text: str) -> ActivationScheme:
        """Inverse of :attr:`text`."""
        per_token = "+token" in text
        if per_token and "+global" in text:
            raise SchemeError(f"activation scheme {text!r} has a global scale per token and per tensor; choose one")
        return cls(QuantScheme.parse(text.replace("+token", "+global")), per_token)

    @classmethod
    def same_as(cls, weight: QuantScheme) -> ActivationScheme:
        """The scheme of a layer's weight for its activations, too; always rounding to nearest."""
        return cls(replace(weight, rounding="nearest"))

    @property
    def text(self) -> str:
        """Short text such as ``ue5m3/16`` or ``e4m3+token/16/absmax``."""
        if not self.per_token:
            return self.scheme.text
        # A preset's name does not say that there is a global scale: spell it out.
        parts = [f"{self.scheme.scale}+token", self.scheme.block_text, str(self.scheme.scale_rule)]
        return "/".join(parts if self.scheme.element == "fp4_e2m1" else [self.scheme.element, *parts])

    def to_dict(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict(), "per_token": self.per_token}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ActivationScheme:
        """Inverse of :meth:`to_dict`. Raises ``SchemeError`` for fields that do not exist."""
        unknown = set(fields) - {"scheme", "per_token"}
        if unknown or "scheme" not in fields:
            raise SchemeError(f"an activation scheme has the fields scheme and per_token, not {sorted(fields)}")
        return cls(QuantScheme.from_dict(fields["scheme"]), bool(fields.get("per_token", False)))

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
