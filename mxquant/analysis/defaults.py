"""What a diagnosis looks at unless told. No torch."""

from __future__ import annotations

SCHEMES = (
    "ue5m3/32",
    "mxfp4",
    "e8m0/16",
    "nvfp4",
    "e4m3/16",
    "ue5m3/16",
    "e4m3/8",
    "e4m3+global/8",
    "ue5m3/8",
    "mxfp6",
)
# Bits per weight: of a mix, and those for which the best single scheme is named.
BUDGET = 4.5
BUDGETS = (4.25, 4.5, 5.0)
