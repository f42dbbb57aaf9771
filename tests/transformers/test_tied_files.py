"""Tied models whose files hold another member of the group than the class calls the source."""

from __future__ import annotations

import shutil

import pytest
import torch
from architecture_cases import CASES
from safetensors.torch import load_file, save_file
from tiny_models import assert_close, logits, make_source

import mxquant
from mxquant.errors import PlanError
from mxquant.inspection.verify import verify_checkpoint
from mxquant.transformers.architectures import NameMapper, build_meta_model

TIED = ("llama-tied", "gpt2", "opt", "falcon", "gemma3")


def _with_the_head_alone(kind, dtype, folder):
    """A source that holds ``lm_head.weight`` in place of the embedding that it is tied to."""
    source = make_source(CASES[kind], folder / "source", dtype)
    tensors = load_file(source / "model.safetensors")
    model = build_meta_model(source)
    mapper = NameMapper(model)
    target, embedding = next(iter(model.all_tied_weights_keys.items()))
    tensors[target] = tensors.pop(next(name for name in tensors if mapper(name) == embedding))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source, target, embedding


@pytest.mark.parametrize("text", ["ue5m3/16", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", TIED)
def test_either_member_of_a_tied_pair_is_enough(kind, text, tmp_path):
    source, target, embedding = _with_the_head_alone(kind, torch.bfloat16, tmp_path)
    case = CASES[kind]
    report = mxquant.quantize_model(source, tmp_path / "q", text, allow_dense=True)
    assert report.plan.tied[embedding] == target
    assert target not in report.plan.tied
    assert not verify_checkpoint(tmp_path / "q", source, samples=None).faults
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "dense")
    assert target in load_file(tmp_path / "dense/model.safetensors")
    expected = logits(case.auto.from_pretrained(tmp_path / "dense"), case)
    found = case.auto.from_pretrained(tmp_path / "q")
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert_close(logits(found, case), expected, 2e-2)
    packed = mxquant.load(tmp_path / "q")
    assert_close(logits(packed, case), expected, 2e-2)


def test_a_model_without_either_is_refused(tmp_path):
    source, target, embedding = _with_the_head_alone(TIED[0], torch.float32, tmp_path)
    tensors = load_file(source / "model.safetensors")
    shutil.copytree(source, tmp_path / "lost")
    save_file({n: t for n, t in tensors.items() if n != target}, tmp_path / "lost/model.safetensors")
    with pytest.raises(PlanError, match=f"lacks {embedding}"):
        mxquant.quantize_model(tmp_path / "lost", tmp_path / "q", "ue5m3/16")
