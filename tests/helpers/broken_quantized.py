"""Broken quantized checkpoints: what is wrong with packed tensors, their scales, and the config that describes them.

``OWN`` are faults of mxquant's own format (UE5M3 scales), ``COMPRESSED`` of compressed-tensors' (NVFP4).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broken_inputs import Fault, Tensors, cut, edit_json, header, repack, writes

Q = "model.layers.1.mlp.up_proj"
PACKED, SCALE, GLOBAL = f"{Q}.weight", f"{Q}.weight_scale", f"{Q}.weight_global_scale"
FILE = "model.safetensors"

OWN: list[Fault] = []
COMPRESSED: list[Fault] = []


def own(name: str, breaks: Callable[[Path], object], *says: str) -> None:
    OWN.append(Fault(name, breaks, says))


def compressed(name: str, breaks: Callable[[Path], object], *says: str) -> None:
    COMPRESSED.append(Fault(name, breaks, says))


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the ``quantization_config``."""
    return lambda folder: edit_json(folder / "config.json", lambda data: change(data["quantization_config"]))


def scheme(**values: Any) -> Callable[[Path], object]:
    return config(lambda c: next(iter(c["schemes"].values())).update(values))


def module(**values: Any) -> Callable[[Path], object]:
    """Changes the entry of the modules that ``Q`` is one of."""

    def change(found: dict[str, Any]) -> None:
        entry = next(e for e in found["modules"] if any(name.endswith("up_proj") for name in e["names"]))
        for key, value in values.items():
            entry.pop(key) if value is ... else entry.update({key: value})

    return config(change)


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    return lambda folder: repack(folder, change, FILE)


def stored(name: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Path], object]:
    return tensors(lambda found: found.update({name: (dtype, shape, data)}))


def lost(name: str) -> Callable[[Path], object]:
    return tensors(lambda found: found.pop(name))


# What the config says of itself

own("a newer format", config(lambda c: c.update(format_version=99)), "format version 99", "upgrade")
own("format version zero", config(lambda c: c.update(format_version=0)), "format_version")
own("format version in words", config(lambda c: c.update(format_version="one")), "format_version", "'one'")
own("no format version", config(lambda c: c.pop("format_version")), "format_version")
own("no schemes", config(lambda c: c.pop("schemes")), "schemes")
own("schemes in a list", config(lambda c: c.update(schemes=list(c["schemes"].values()))), "config.json")
own("no modules", config(lambda c: c.pop("modules")), "modules")
own("an empty list of modules", config(lambda c: c.update(modules=[])), "config", "packed")
own("modules that are numbers", config(lambda c: c.update(modules=[1, 2])), "config.json")
own("a scheme that is not described", module(scheme="no-such-scheme"), "no-such-scheme")
own("an unknown element", scheme(element="fp4_e9m9"), "fp4_e9m9")
own("an unknown scale format", scheme(scale="ue9m9"), "ue9m9")
own("an unknown field of a scheme", scheme(colour="red"), "colour")
own("a block of zero", scheme(block=0), "block")
own("a block in words", scheme(block="sixteen"), "sixteen")
own("another block than the scales have", scheme(block=8), "mlp.down_proj.weight_scale", "[32, 6]")
own("another element than the codes are", scheme(element="fp8_e4m3"), "mlp.down_proj.weight", "[1536]")
own("a module without a scheme", module(scheme=...), "scheme")
own("a module without names", module(names=...), "names")
own("names that are one text", module(names="model"), "names", "'model'")
own("names that are numbers", module(names=[7]), "names")
own("a module without a shape", module(shape=...), "shape")
own("a shape of one number", module(shape=[48]), "config.json", "[48]")
own("a shape in words", module(shape=["a", "b"]), "config.json", "['a', 'b']")
own("a shape of zero", module(shape=[0, 32]), "config.json", "[0, 32]")
own("a negative shape", module(shape=[-48, 32]), "config.json", "[-48, 32]")
own("a shape that lies", module(shape=[48, 64]), "gate_proj.weight is U8 [48, 16]", "[48, 32]")
own("a module said to hold experts", module(experts=2), "proj")
own("experts in words", module(experts="two"), "config.json", "'two'")
own("a module that the files do not hold", config(lambda c: c["modules"][0]["names"].append("model.ghost_proj")),
    "model.ghost_proj")  # fmt: skip
own("activations of no known format", module(activations={"scheme": {"element": "fp4_e9m9"}}), "fp4_e9m9")
own("a KV cache of no known format", config(lambda c: c.update(kv_cache="everything")), "config.json", "'everything'")

# Packed tensors and scales

own("packed weights lost", lost(PACKED), Q)
own("packed weights of another shape", stored(PACKED, "U8", [16, 48], bytes(768)), PACKED, "[16, 48]", "[48, 16]")
own("packed weights too few", stored(PACKED, "U8", [47, 16], bytes(752)), PACKED, "[47, 16]", "[48, 16]")
own("packed weights as signed bytes", stored(PACKED, "I8", [48, 16], bytes(768)), PACKED, "I8")
own("packed weights replaced by dense ones", stored(PACKED, "BF16", [48, 32], bytes(3072)), PACKED, "BF16")
own("block scales lost", lost(SCALE), SCALE)
own("block scales of another shape", stored(SCALE, "U8", [2, 48], bytes(96)), SCALE, "[2, 48]", "[48, 2]")
own("block scales of another dtype", stored(SCALE, "F8_E4M3", [48, 2], bytes(96)), SCALE, "F8_E4M3")
own("block scales in fp32", stored(SCALE, "F32", [48, 2], bytes(384)), SCALE, "F32")

# Files

own("weights cut off", cut(FILE, -100), FILE)
own("weights empty", writes(FILE, b""), FILE)
own("weights a pointer of git-lfs", writes(FILE, "version https://git-lfs.github.com/spec/v1\n"), FILE, "git lfs pull")
own("weights with a broken header", header(lambda h: h[PACKED].update(shape=[1, 1]), FILE), FILE)
own("weights missing", lambda folder: (folder / FILE).unlink(), "safetensors")

# compressed-tensors

compressed("a global scale lost", lost(GLOBAL), GLOBAL)
compressed("a global scale of two numbers", stored(GLOBAL, "F32", [2], bytes(8)), GLOBAL, "[2]")
compressed("a global scale in bfloat16", stored(GLOBAL, "BF16", [1], bytes(2)), GLOBAL, "BF16")
compressed("scales lost", lost(SCALE), SCALE)
compressed("scales of another dtype", stored(SCALE, "I8", [48, 2], bytes(96)), f"{Q}.weight", "I8")
compressed("scales of another shape", stored(SCALE, "F8_E4M3", [2, 48], bytes(96)), f"{Q}.weight")
compressed("packed weights of another shape", stored(f"{PACKED}_packed", "U8", [16, 48], bytes(768)), f"{Q}.weight")
compressed("packed weights that are a vector", stored(f"{PACKED}_packed", "U8", [768], bytes(768)), f"{Q}.weight")
compressed("packed weights lost", lost(f"{PACKED}_packed"), Q)
compressed("weights cut off", cut(FILE, -100), FILE)
