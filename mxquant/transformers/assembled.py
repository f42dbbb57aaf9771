"""What the loader of transformers makes of the tensors of a checkpoint: one tensor for each of the model's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from mxquant.transformers.architectures import NameMapper

# A tensor of the files by its name.
Read = Callable[[str], torch.Tensor]


def assembled(
    model: Any, mapper: NameMapper, names: Iterable[str], read: Read, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, list[str], torch.Tensor]]:
    """Name in the model, names of the tensors in the files, and the tensor that they make, one after the other.

    ``model``: may be on the meta device. ``names``: of all tensors in the files, as a dense checkpoint calls them;
    those without a place in the model are left out. ``dtypes``: of the model's tensors, to which the loader brings
    those of the files first. Renamed, stacked, concatenated and split by the loader's own rules. Raises whatever
    these raise for tensors that do not fit.
    """
    from transformers.core_model_loading import dot_natural_key

    collected: dict[str, list[tuple[str, str | None, Any]]] = defaultdict(list)
    for name in sorted(names, key=dot_natural_key):
        target, pattern, converter = mapper.conversion(name)
        if target is not None:
            collected[target].append((name, pattern, converter))
    for target, parts in collected.items():
        sources = [name for name, _, _ in parts]
        converter = copy.deepcopy(parts[0][2])  # it collects what it is given
        if converter is None:
            for name in sources:  # of several, the loader keeps one; all must be what it has
                yield target, [name], read(name).to(dtypes[target])
            continue
        for name, pattern, _ in parts:
            converter.add_tensor(target, name, pattern, read(name).to(dtypes[target]))
        for made, value in converter.convert(target, model=model, config=model.config).items():
            yield made, sources, value[0] if isinstance(value, list) else value
