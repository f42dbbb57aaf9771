"""Tiny random models of ``architecture_cases.py``, quantized, and their dense twins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from architecture_cases import CASES, IMAGE, Case
from safetensors.torch import load_file, save_file

import mxquant
from mxquant.schemes.formats import QuantScheme


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@torch.no_grad()
def logits(model: torch.nn.Module, case: Case) -> torch.Tensor:
    """Of a sentence, and of an image where the model sees some."""
    tokens = torch.randint(9, 64, (1, 12), generator=torch.Generator().manual_seed(3))
    tokens[0, 2 : 2 + case.parts] = IMAGE
    inputs = {k: t.to(model.dtype) if t.is_floating_point() else t for k, t in case.images().items()}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
    return model(input_ids=tokens, **inputs).logits.float()


def assert_close(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-5) -> None:
    assert (a - b).norm() <= bound * b.norm()


def decoded(
    name: str, weight: torch.Tensor, scheme: QuantScheme, transposed: bool, divisors: torch.Tensor | None
) -> torch.Tensor:
    """The tensor that a quantized one stands for, matrix by matrix."""
    stack, made = weight if weight.ndim == 3 else weight[None], []
    for e, matrix in enumerate(stack):
        own = name if weight.ndim == 2 else f"{name}.{e}"
        given = None if divisors is None else divisors[e : e + 1]
        q = mxquant.quantize(matrix.t().contiguous() if transposed else matrix, scheme, name=own, global_scale=given)
        made.append(q.dequantize(weight.dtype).t() if transposed else q.dequantize(weight.dtype))
    return torch.stack(made) if weight.ndim == 3 else made[0]


def make_source(case: Case, folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = case.auto.from_config(case.config()).to(dtype)
    for name, parameter in model.named_parameters():  # biases and norms start as constants
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


class Quantized:
    """A model of a kind quantized, and the dense one that it stands for."""

    def __init__(self, kind: str, text: str, dtype: torch.dtype, folder: Path):
        self.case, self.path, scheme = CASES[kind], folder / "q", QuantScheme.parse(text)
        self.source = make_source(self.case, folder / "source", dtype)
        self.plan = mxquant.quantize_model(self.source, self.path, scheme).plan
        self.before, self.tensors = tensors_of(self.source), tensors_of(self.path)
        self.dense = folder / "dense"
        shutil.copytree(self.source, self.dense)
        tensors = {
            name: decoded(name, t, scheme, kind == "gpt2", self.tensors.get(f"{name}_global_scale")).contiguous()
            if name in self.case.quantized
            else t
            for name, t in self.before.items()
        }
        save_file(tensors, self.dense / "model.safetensors", metadata={"format": "pt"})

    def loaded(self, folder: Path, **options: object) -> torch.nn.Module:
        return self.case.auto.from_pretrained(folder, **options)


def quantizer(make_folder: Callable[[str], Path]) -> Callable[..., Quantized]:
    """``quantized(kind, text="ue5m3/16", dtype=torch.float32)``, each made once."""
    made: dict[tuple[str, str, torch.dtype], Quantized] = {}

    def make(kind: str, text: str = "ue5m3/16", dtype: torch.dtype = torch.float32) -> Quantized:
        if (kind, text, dtype) not in made:
            made[kind, text, dtype] = Quantized(kind, text, dtype, make_folder(kind))
        return made[kind, text, dtype]

    return make
