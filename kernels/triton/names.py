"""The scale rules that :mod:`mxquant.kernels.triton.rules` has, by kind of scale. Imports no Triton."""

from __future__ import annotations

E8M0_RULES = ("floor", "ceil", "even", "rceil", "oas", "search")
MANTISSA_RULES = ("absmax", "absmax-nonzero", "ceil", "four-over-six", "search")
