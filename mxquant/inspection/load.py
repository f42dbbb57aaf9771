"""Whether a checkpoint loads as its users load it, into exactly what its files hold.

The model is made by ``from_pretrained`` of its class, and every parameter and persistent buffer of it is compared
with what the files decode to, brought to its place by the loader's own rules. That finds what a loader leaves out
in silence: weights that it drops, those that it fills with random numbers or leaves as they were in memory, and
those that it ties. Then a few tokens go through the model, because some faults show only there, such as dtypes
that do not multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.checkpoint.formats import compressed_tensors
from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.formats.packed import PackedWeight
from mxquant.checkpoint.reader import Checkpoint
from mxquant.convert.memory import available_bytes
from mxquant.errors import CheckpointError
from mxquant.inspection.agreement import Model
from mxquant.inspection.faults import Verification
from mxquant.transformers import loaded
from mxquant.transformers.architectures import first_line
from mxquant.transformers.assembled import assembled

# Unless told to, a model is loaded only if it needs at most this share of the memory that is available.
MEMORY_SHARE = 0.5


def check_load(
    checkpoint: Checkpoint,
    layout: Layout,
    model: Model | None,
    found: Verification,
    wanted: bool | None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Faults of loading.

    ``model``: the class without weights; ``wanted``: True to load whatever it takes, None to load if nothing is
    wrong so far and memory suffices. What was decided, and why, is added to ``checked``. Raises ``CheckpointError``
    if ``wanted`` and this kind of checkpoint cannot be loaded here.
    """
    if wanted is False:
        return
    obstacle = "transformers does not know its class" if model is None else loaded.why_not_loadable(layout.method)
    if wanted is None:
        obstacle = obstacle or _why_not_now(checkpoint, layout, model, found)
    if obstacle or model is None:
        if wanted:
            raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {obstacle}")
        found.checked["loaded"] = f"no ({obstacle})"
        return
    check = Loading(checkpoint, layout, model, trust_remote_code)
    if not _holds_single_experts(layout, model):
        check(found)
        return
    # Engines stack packed experts, and so does this library; transformers may not, and is no judge of them.
    alone = Verification(found.path)
    check(alone)
    if not alone.faults:
        found.checked |= alone.checked
        return
    found.warnings.append(f"transformers by itself does not read its packed experts: {alone.faults[0].message}")
    check(found, keep_packed=True)


def _why_not_now(checkpoint: Checkpoint, layout: Layout, model: Model | None, found: Verification) -> str | None:
    """Why the model is not loaded without being asked for."""
    if found.faults:
        return "faults were found before"
    assert model is not None
    needed, available = needed_bytes(checkpoint, layout, model), available_bytes()
    if available is None:
        return f"it needs {_gb(needed)}, and how much memory is available is not known; --load loads it anyway"
    if needed > MEMORY_SHARE * available:
        share = f"{MEMORY_SHARE:.0%} of the {_gb(available)} available"
        return f"it needs {_gb(needed)}, more than {share}; --load loads it anyway"
    return None


def needed_bytes(checkpoint: Checkpoint, layout: Layout, model: Model) -> int:
    """Memory for the whole model decoded, the packed tensors beside it, and one weight in fp32 three times."""
    tensors = {id(t): t for t in model.built.state_dict(keep_vars=True).values()}.values()
    packed = sum(checkpoint.tensors[name].nbytes for name in layout.part_names if name in checkpoint.tensors)
    largest = max((t.numel() for t in tensors), default=0)
    return sum(t.numel() * t.element_size() for t in tensors) + packed + 3 * 4 * largest


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _holds_single_experts(layout: Layout, model: Model) -> bool:
    """Whether packed weights of compressed-tensors are parts of a stack of experts in the model."""
    if layout.method != compressed_tensors.QUANT_METHOD:
        return False
    places = (model.mapper.place(weight.name) for weight in layout.weights)
    return any(place is not None and not place.is_whole for place in places)


@dataclass(frozen=True)
class Loading:
    """Loads a checkpoint and adds what is wrong with that: ``loading(found)``."""

    checkpoint: Checkpoint
    layout: Layout
    model: Model
    trust_remote_code: bool

    def __call__(self, found: Verification, *, keep_packed: bool = False) -> None:
        """``keep_packed``: by :func:`mxquant.load`, whatever transformers does by itself."""
        method, folder = self.layout.method, self.checkpoint.folder
        try:
            built, info = loaded.load_as_users_do(
                folder, method, trust_remote_code=self.trust_remote_code, keep_packed=keep_packed
            )
        except Exception as error:  # a loader that does not know what to do with the files raises anything
            found.checked["loaded"] = "failed"
            found.add("load", f"{self.model.name} cannot be loaded: {_line(error)}")
            return
        found.checked["loaded"] = type(built).__name__ + (" (by mxquant.load)" if keep_packed else "")
        self._check_info(info, found)
        loaded.decompress(built)
        self._check_values(built, info, found)  # first, as some models change their weights when they run
        self._check_forward(built, found)

    def _check_info(self, info: dict[str, Any], found: Verification) -> None:
        """Faults that the loader itself reports. Dense tensors that it has no use for are warnings elsewhere."""
        for name in sorted(info["missing_keys"]):
            found.add("load", f"no tensor of the files fills {name}, so the loader makes up its values")
        for name, stored, needed in sorted(info["mismatched_keys"]):
            found.add("load", f"{name} is {list(stored)} in the files, and the model needs {list(needed)}")
        leaves = {name.rpartition(".")[2] for name in self.layout.part_names} - {"weight"}
        for name in sorted(info["unexpected_keys"]):
            if name.rpartition(".")[2] in leaves:
                found.add("load", f"{name} is a part of a packed weight, and the loader has no use for it")
        for message in info.get("error_msgs") or ():
            found.add("load", f"the loader says: {' '.join(str(message).split())[:300]}")

    def _check_forward(self, built: Any, found: Verification) -> None:
        """A fault if the model cannot be run, or makes numbers that are none; a note where its class does, too."""
        why = loaded.why_not_tokens(built)
        if why is not None:
            found.checked["forward"] = f"no ({why})"
            return
        try:
            output = loaded.run_on_tokens(built)
        except Exception as error:  # of a model's own code, anything
            if loaded.fails_alike(self.model.built, built.dtype, error):
                found.checked["forward"] = f"no (a dense {self.model.name} fails as well: {_line(error)})"
                return
            found.checked["forward"] = "failed"
            found.add("load", f"the loaded model fails at its first tokens: {_line(error)}")
            return
        found.checked["forward"] = "yes"
        bad = int((~output.isfinite()).sum())
        if bad:
            found.add("load", f"the loaded model's first logits are NaN or infinite: {bad} of {output.numel()}")

    def _check_values(self, built: Any, info: dict[str, Any], found: Verification) -> None:
        """Faults of tensors of the model that are not what the files decode to, or that no tensor of them fills."""
        dense = loaded.dense_tensors(built, {p.name for p in self.model.parameters.values() if p.transposed})
        packed = {weight.name: weight for weight in self.layout.weights}
        parts = self.layout.part_names | {*self.layout.unlisted, *self.layout.activation_scales}
        names = [*(name for name in self.checkpoint.tensors if name not in parts), *packed]

        def read(name: str) -> torch.Tensor:
            return decoded(packed[name], self.checkpoint) if name in packed else self.checkpoint.read(name)

        dtypes = {name: held.dtype for name, held in dense.items()}
        names = [name for name in names if self.model.mapper.conversion(name)[0] in dtypes]
        filled: dict[str, list[str]] = {}
        try:
            for name, sources, wanted in assembled(self.model.built, self.model.mapper, names, read, dtypes):
                filled[name] = sources
                problem = difference(dense[name].read(), wanted, exact=not packed.keys() & set(sources))
                if problem:
                    found.add("load", f"{name} of the loaded model {problem} {_named(sources)} of the files")
        except Exception as error:  # of rules of the loader on tensors that do not fit them
            found.add("load", f"the files cannot be brought into the model: {_line(error)}")
            return
        for name, source in _twins(self.model, dense, filled).items():
            if not torch.equal(dense[name].read(), dense[source].read()):
                found.add("load", f"{name} of the loaded model is not {source}, which it is tied to")
            filled[name] = filled[source]
        made_up = set(info["missing_keys"])
        parameters = {name for name, _ in built.named_parameters(remove_duplicate=False)}
        for name in dense:
            if name not in filled and name not in made_up and name in parameters | set(self.model.parameters):
                found.add("load", f"no tensor of the files fills {name} of the loaded model")
        found.checked["tensors compared after loading"] = len(filled)


def _twins(model: Model, dense: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that no tensor of the files fills -> one that is filled, and that the model's class ties them to."""
    groups: dict[str, set[str]] = {}
    for p in model.parameters.values():
        if p.tied_to is not None:
            groups.setdefault(p.tied_to, {p.tied_to}).add(p.name)
    found: dict[str, str] = {}
    for members in groups.values():
        source = next((m for m in sorted(members) if m in filled), None)
        if source is not None:
            found |= {m: source for m in members if m in dense and m not in filled}
    return found


def decoded(weight: PackedWeight, checkpoint: Checkpoint) -> torch.Tensor:
    """The dense tensor that a packed weight stands for, fp32."""
    matrices = []
    for matrix in weight.read(checkpoint):
        rows = torch.cat([matrix.dequantize(start, stop) for start, stop in matrix.chunks()])
        matrices.append(rows.t() if weight.transposed else rows)
    return torch.stack(matrices) if weight.experts is not None else matrices[0].contiguous()


def difference(held: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> str | None:
    """How a tensor of the model differs from what it should be; None if it does not.

    ``exact``: to the bit, NaN being equal to NaN. Otherwise to one unit in the last place of the model's dtype, as
    decoders may round more than once.
    """
    if held.shape != wanted.shape:
        return f"is {list(held.shape)}, not the {list(wanted.shape)} of"
    wanted = wanted.to(held.device, held.dtype)
    if not held.is_floating_point():
        return None if torch.equal(held, wanted) else "differs from"
    a, b = held.float(), wanted.float()
    bound = 0.0 if exact else b.abs() * torch.finfo(held.dtype).eps
    # NaN compares false.
    wrong = int((~((a - b).abs() <= bound) & ~((a == b) | (a.isnan() & b.isnan()))).sum())
    return f"differs in {wrong} of {held.numel()} values from" if wrong else None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
