"""Training recipes: what they say of each operand, their way through YAML and JSON, and bad ones."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
import yaml

from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe
from mxquant.training.recipes import (
    OPERANDS,
    RECIPES,
    LinearFormats,
    TrainingRecipe,
    TrainingRule,
    weights_as_yaml,
)

TILES = QuantScheme(scale="e8m0", block=(32, 32), scale_rule="rceil")


def stochastic(formats: LinearFormats) -> set[str]:
    return {o for o in OPERANDS if (s := formats.scheme(o)) is not None and s.rounding == "stochastic"}


def test_the_papers_recipe_is_what_the_paper_says():
    recipe = RECIPES["fp4-2d-qk8"]
    for projection in ("v_proj", "o_proj"):
        formats = recipe.decide(f"model.layers.0.self_attn.{projection}").formats
        assert formats.weight_forward == formats.weight_dgrad == formats.activation_wgrad == TILES
    for projection in ("q_proj", "k_proj"):
        formats = recipe.decide(f"model.layers.0.self_attn.{projection}").formats
        assert {formats.scheme(o).element for o in OPERANDS} == {"fp8_e4m3"}
    assert recipe.decide("model.layers.0.mlp.up_proj").formats == RECIPES["fp4-2d"].default


@pytest.mark.parametrize("name", ["mxfp4-1d-tf-sr", "fp4-2d", "nvfp4", "ue5m3-2d"])
def test_stochastic_rounding_is_for_gradients_only(name):
    assert stochastic(RECIPES[name].default) == {"gradient_dgrad", "gradient_wgrad"}


def test_only_tiles_with_one_scheme_serve_two_products():
    assert all(RECIPES["fp4-2d"].default.shared(role) for role in ("weight", "activation", "gradient"))
    assert not any(RECIPES["mxfp4-1d"].default.shared(role) for role in ("weight", "activation", "gradient"))
    nvfp4 = RECIPES["nvfp4"].default
    assert [nvfp4.shared(role) for role in ("weight", "activation", "gradient")] == [True, False, False]
    mixed = LinearFormats.of({"weight": {"forward": "e8m0/32x32/rceil", "dgrad": "e8m0/16x16/rceil"}})
    assert not mixed.shared("weight")
    assert not LinearFormats.of({"weight": "e8m0/16x32/rceil"}).shared("weight")


def test_decoder_blocks_at_either_end_stay_high_whatever_the_rules_say():
    recipe = RECIPES["nvfp4"]
    kept = [i for i in range(5) if recipe.decide(f"model.layers.{i}.mlp.up_proj", i, 5).formats is None]
    assert kept == [0, 4]
    assert recipe.decide("lm_head").formats is not None  # conversion leaves heads alone unless they are named


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_round_trip(name, dump, tmp_path):
    recipe = RECIPES[name].override(exclude=["o_proj"])
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe.to_dict()))
    assert TrainingRecipe.from_file(file) == recipe


def test_a_file_can_start_from_a_named_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: fp4-2d\nrules:\n  - o_proj: high\n  - down_proj: {gradient: {wgrad: ue5m3/16}}\n")
    recipe = TrainingRecipe.of(file)
    assert (recipe.name, recipe.default) == ("mine", RECIPES["fp4-2d"].default)
    assert recipe.decide("o_proj").formats is None
    down = recipe.decide("down_proj").formats
    assert [o for o in OPERANDS if down.scheme(o)] == ["gradient_wgrad"]


def test_overrides():
    recipe = RECIPES["fp4-2d-qk8"].override(block=16, rounding={"gradient": "nearest"}, exclude=["o_proj"])
    assert recipe.default.weight_forward.block == (16, 16)
    assert not stochastic(recipe.default)
    assert recipe.decide("x.o_proj").formats is None
    assert recipe.decide("x.q_proj").formats == RECIPES["fp4-2d-qk8"].decide("x.q_proj").formats
    assert RECIPES["mxfp4-1d"].override(block=16).default.weight_forward.block == 16
    assert RECIPES["fp4-2d"].override(block="1x16").default.weight_forward.block == 16
    assert RECIPES["fp4-2d"].override(scale_rule="floor").default.weight_forward.scale_rule == "floor"


def test_the_recipe_of_the_weights_is_one_that_quantize_reads(tmp_path):
    file = tmp_path / "quantize.yaml"
    for name, recipe in RECIPES.items():
        if not recipe.quantizes:
            continue
        file.write_text(weights_as_yaml(recipe, blocks=12))
        weights = QuantRecipe.from_file(file)
        for i, projection in product((0, 1, 10, 11), ("q_proj", "up_proj")):
            formats = recipe.decide(module := f"model.layers.{i}.x.{projection}", i, 12).formats
            expected = None if formats is None else formats.weight_forward
            assert weights.decide(module).scheme == expected, (name, module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingRecipe.of("fp4-3d"), "unknown training recipe 'fp4-3d'"),
        (lambda: TrainingRecipe.of("nowhere.yaml"), "cannot read training recipe nowhere.yaml"),
        (lambda: LinearFormats.of({"wait": "mxfp4"}), "unknown role 'wait'"),
        (lambda: LinearFormats.of({"weight": {"wgrad": "mxfp4"}}), "unknown product of weight 'wgrad'"),
        (lambda: LinearFormats.of({"weight": "high"}), "no quantized operand"),
        (lambda: LinearFormats.of({"weight": 4}), "scheme 4 must be a text"),
        (lambda: TrainingRule("(", None), "not a regular expression"),
        (lambda: RECIPES["fp4-2d"].override(rounding={"grad": "nearest"}), "unknown role 'grad'"),
        (lambda: RECIPES["fp4-2d"].override(scale_rule="absmax"), "scale rule 'absmax' does not exist for e8m0"),
        (lambda: LinearFormats.of({"activation": "e8m0/32x32", "hadamard": True}), "Hadamard transform"),
        (lambda: TrainingRecipe("x", keep_first=-1), "cannot be negative"),
        (lambda: TrainingRecipe.from_dict({"deflt": "mxfp4"}), "unknown recipe key 'deflt'"),
        (lambda: TrainingRecipe.from_dict({"rules": ["o_proj"]}), "must look like `pattern: formats`"),
        (lambda: TrainingRecipe.from_dict(["o_proj"]), "must be a mapping"),
    ],
)
def test_bad_recipes_say_what_is_wrong(make, message):
    with pytest.raises(SchemeError, match=re.escape(message)):
        make()


def test_a_broken_file_is_named(tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_text("default: {weight: fp5}")
    with pytest.raises(SchemeError, match=r"broken.yaml.*'fp5'"):
        TrainingRecipe.of(file)
