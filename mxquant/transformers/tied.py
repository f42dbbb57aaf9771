"""Layers that share their weights with a packed one, as the blocks that Zamba repeats do.

transformers ties parameters by name. Packed weights are buffers, and several to a layer, so layers
are shared in place of weights: they are out of the loader's way while it works, and one module
stands in all places afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from mxquant.transformers.architectures import inventory


def repeated(model: Any, packed: Collection[str], held: Collection[str | None]) -> dict[str, str]:
    """Layers whose weight is tied to that of a layer in ``packed`` -> that layer.

    ``held``: parameters that the checkpoint has tensors for; these are no copies, whatever the class says.
    """
    ties = {p.module: p.tied_to for p in inventory(model) if p.tied_to and p.name.endswith(".weight")}
    sources = {name: tied_to.removesuffix(".weight") for name, tied_to in ties.items() if f"{name}.weight" not in held}
    return {name: source for name, source in sources.items() if source in packed}


def set_aside(model: Any, packed: Collection[str], copies: Mapping[str, str]) -> None:
    """Take the copies out of the model, and what is packed out of the loader's list of tied parameters."""
    for name in copies:
        model.set_submodule(name, nn.Identity())
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in list(ties.items()):
        target = name.rpartition(".")[0]
        if target in copies or target in packed or source.rpartition(".")[0] in packed:
            del ties[name]


def put_back(model: Any, copies: Mapping[str, str]) -> None:
    """Have the packed layers stand in the place of their copies, too."""
    for name, source in copies.items():
        model.set_submodule(name, model.get_submodule(source))
