"""Where in a model a module is: which layer, which projection."""

from __future__ import annotations

from collections.abc import Iterable


def place(module: str) -> tuple[int | None, str]:
    """Layer and projection: ``model.layers.3.mlp.up_proj`` -> ``(3, "mlp.up_proj")``.

    The first number in the name is the layer; later ones (experts) become ``*``. A name without numbers is
    its own projection, in no layer.
    """
    parts = module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if first is None:
        return None, module
    return int(parts[first]), ".".join("*" if part.isdigit() else part for part in parts[first + 1 :])


def short_names(projections: Iterable[str]) -> dict[str, str]:
    """Each projection's shortest ending that no other one has: ``mlp.up_proj`` -> ``up_proj``."""
    names = list(dict.fromkeys(projections))
    short = {}
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1))
        alone = (e for e in endings if sum(n == e or n.endswith(f".{e}") for n in names) == 1)
        short[name] = next(alone, name)
    return short
