"""What is meant by a scheme in a question to the theory."""

from __future__ import annotations

from mxquant.schemes.formats import SCALES, QuantScheme


def scheme_of(
    scheme: QuantScheme | str,
    *,
    block: int | tuple[int, int] | None = None,
    element: str | None = None,
    rule: str | None = None,
    rounding: str | None = None,
) -> QuantScheme:
    """The scheme that a bare scale (``"ue5m3"``, ``"e4m3+global"``), a scheme's text or a scheme stands for.

    A bare scale has the rule ``absmax``, as in arXiv 2601.19026, or ``even`` if it is e8m0. A text such as
    ``"ue5m3/16"`` or ``"nvfp4"`` is that of :meth:`QuantScheme.parse`, default rules included. What else is
    given replaces that of the scheme. Raises ``SchemeError``.
    """
    if isinstance(scheme, str):
        bare = is_bare_scale(scheme)
        scheme = QuantScheme.parse(scheme)
        if bare:
            scheme = scheme.merge(scale_rule=scheme.scale_format.plain_rule)
    return scheme.merge(block=block, element=element, scale_rule=rule, rounding=rounding)


def is_bare_scale(text: str) -> bool:
    """Whether a text names a scale format, with or without a global scale, and nothing else."""
    return text.strip().removesuffix("+global") in SCALES
