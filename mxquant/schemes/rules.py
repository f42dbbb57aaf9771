"""Scale rules in words, for whoever compares schemes: a difference of rules must not pass for one of formats."""

from __future__ import annotations

from collections.abc import Iterable

from mxquant.schemes.formats import SCALES, QuantScheme


def rules_note(schemes: Iterable[QuantScheme]) -> str:
    """Which scale rules the schemes have, e.g. ``search``, or ``search for e4m3 and ue5m3, even for e8m0``."""
    rules: dict[str, list[str]] = {}
    for scheme in schemes:
        scales = rules.setdefault(str(scheme.scale_rule), [])
        if scheme.scale not in scales:
            scales.append(scheme.scale)
    if len(rules) == 1:
        return next(iter(rules))
    return ", ".join(f"{rule} for {' and '.join(scales)}" for rule, scales in rules.items())


def default_rules_note() -> str:
    """The default rules of the scale formats that are not for studies only."""
    return rules_note(QuantScheme(scale=name) for name in SCALES if name in ("e4m3", "ue5m3", "e8m0"))
