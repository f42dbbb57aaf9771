"""Whether packed and dense layers are where loaders expect them: every dense one named by the config, fused ones alike.

The configs of compressed-tensors (``ignore``), ModelOpt (``exclude_modules``) and Quark (``exclude``) list what is
dense, and loaders take everything else for packed. Of a linear layer that is neither, they drop the weight, and
what is computed with is whatever lay in memory.
"""

from __future__ import annotations

from mxquant.checkpoint.formats import native
from mxquant.checkpoint.formats.base import Layout
from mxquant.checkpoint.reader import Checkpoint
from mxquant.inspection.agreement import Model
from mxquant.inspection.faults import Verification
from mxquant.schemes.formats import QuantScheme
from mxquant.transformers.kinds import Kind
from mxquant.transformers.linears import loader_linears
from mxquant.transformers.select import engine_problems

# Matrices that engines have no linear layer for either.
_NO_LINEARS = (Kind.EMBEDDING, Kind.NORM, Kind.CONVOLUTION)


def check_linears(checkpoint: Checkpoint, layout: Layout, model: Model, found: Verification) -> None:
    """Faults of layers that are dense, or packed, against the config.

    Those of the model have the names of its modules, by which transformers looks them up in the config; engines
    bring the config's names to their own. A tensor that the class has no place for, such as those of layers that
    predict several tokens, has the name of the files: engines that know it look for that.
    """
    if layout.must_be_packed is None:
        return
    packed = {_module(model.mapper.target(weight.name) or weight.name) for weight in layout.weights}
    linears = loader_linears(model.built)
    parts = layout.part_names | {*layout.unlisted, *layout.activation_scales}
    dense = {name: info for name, info in checkpoint.tensors.items() if name not in parts and name.endswith(".weight")}
    holders = {target: name for name in dense if (target := model.mapper.target(name)) is not None}
    tied = {p.name: p.tied_to for p in model.parameters.values() if p.tied_to}
    for module in linears:
        name = f"{module}.weight"
        if module in packed:
            if layout.must_be_dense(module):
                found.add("config", f"{name} is packed, and the config says that it is dense")
        elif (name in holders or name in tied) and layout.must_be_packed(module):
            what = f"{holders[name]} is dense" if name in holders else f"{name} is tied to {tied[name]}"
            found.add("config", f"{what}, and the config says that {module} is packed; loaders drop a dense weight")
    for name, info in dense.items():
        module, target = _module(name), model.mapper.target(name)
        if len(info.shape) != 2 or not layout.must_be_packed(module):
            continue
        if target is None:
            if "embed" not in module:  # nothing but its name says what a layer is that the class has not
                found.add(
                    "config",
                    f"{name} is dense, and the config says that {module} is packed; {model.name} has no such layer, "
                    "but engines do",
                )
        elif _module(target) not in linears and layout.must_be_packed(_module(target)) and _multiplies(model, target):
            found.warnings.append(f"{name} is dense, and the config does not say so; an engine may expect it packed")


def check_stale(layout: Layout, model: Model | None, found: Verification) -> None:
    """A warning of names that the config keeps dense and that neither the files nor the model have."""
    modules = set() if model is None else {name for name, _ in model.built.named_modules()}
    stale = [name for name in layout.stale if name not in modules]
    if stale:
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        found.warnings.append(f"the config keeps {stale[0]}{more} dense, and the files hold no such module")


def check_fused(checkpoint: Checkpoint, layout: Layout, found: Verification) -> None:
    """Warnings of layers that engines fuse and that have not one format; of checkpoints that engines read."""
    if layout.method in (None, native.QUANT_METHOD):
        return
    parts = layout.part_names
    schemes: dict[str, QuantScheme | None] = {weight.module: weight.scheme for weight in layout.weights}
    schemes |= {
        _module(info.name): None
        for info in checkpoint.tensors.values()
        if info.name not in parts and info.name.endswith(".weight") and len(info.shape) == 2
    }
    found.warnings += [f"not read by vLLM and SGLang as it is: {problem}" for problem in engine_problems(schemes)]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _multiplies(model: Model, name: str) -> bool:
    """Whether engines may have a linear layer where the model has a matrix of some other kind, as routers are."""
    parameter = model.parameters.get(name)
    return parameter is not None and parameter.kind not in _NO_LINEARS
