"""The cost model against the paper's figures and against counting by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoConfig

from mxquant.training import RECIPES, LinearFormats, TrainingRecipe
from mxquant.training.cost import cost


@pytest.fixture(scope="module")
def olmo():
    config = OlmoConfig(
        vocab_size=50304, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_the_papers_figures_for_olmo_1b(olmo):
    found = cost(olmo, "fp4-2d-qk8")
    assert round(found.bytes_before / 1e6, 1) == 2353.5
    assert round(found.bytes_after / 1e6, 1) == 810.0
    assert round(100 * found.saved, 1) == 65.6
    assert round(found.speedup, 2) == 3.56


def test_components_counted_by_hand(olmo):
    parts = {c.name: c for c in cost(olmo, "fp4-2d-qk8").components}
    assert set(parts) == {"embedding, bf16", "linear, fp8_e4m3", "linear, fp4_e2m1"}
    assert parts["embedding, bf16"].bytes_after == 50304 * 2048 * 2
    assert parts["linear, fp8_e4m3"].bytes_after == 16 * 2 * 2048 * 2048
    four = 16 * (2 * 2048 * 2048 + 3 * 2048 * 8192)
    assert parts["linear, fp4_e2m1"].parameters == four
    assert parts["linear, fp4_e2m1"].bytes_after == four // 2
    assert parts["linear, fp4_e2m1"].scale_bytes == four // 1024


def test_speed_is_that_of_the_wider_operand_and_of_the_layers_that_stay_high(olmo):
    assert cost(olmo, "bf16").speedup == 1.0
    assert cost(olmo, "bf16").saved == 0.0
    assert cost(olmo, "mxfp4-1d").speedup == 4.0
    assert cost(olmo, "nvfp4").speedup == pytest.approx(1 / (2 / 16 + 14 / 16 / 4))
    # Weights alone make no product faster; with activations one of three is.
    assert cost(olmo, TrainingRecipe("x", LinearFormats.of({"weight": "mxfp4"}))).speedup == 1.0
    two = LinearFormats.of({"weight": "mxfp4", "activation": {"forward": "mxfp8"}})
    assert cost(olmo, TrainingRecipe("x", two)).speedup == pytest.approx(3 / (0.5 + 2))


def test_every_parameter_is_counted_once(olmo):
    assert cost(olmo, RECIPES["fp4-2d"]).parameters == sum(p.numel() for p in olmo.parameters())
    assert cost(olmo, RECIPES["fp4-2d"]).state_bytes == 16 * cost(olmo, "bf16").parameters
