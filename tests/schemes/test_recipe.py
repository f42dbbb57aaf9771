"""Ordered rules: the first match decides, and a recipe survives the way through YAML and JSON."""

from __future__ import annotations

import json

import pytest
import yaml

from mxquant.errors import SchemeError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe, Rule

UE5M3 = QuantScheme(scale="ue5m3", block=16)
MXFP8 = QuantScheme.preset("mxfp8")


def test_first_matching_rule_decides():
    recipe = QuantRecipe(rules=(Rule("q_proj", MXFP8), Rule("attn", None)), default=UE5M3)
    assert recipe.decide("layers.0.attn.q_proj").scheme == MXFP8
    assert recipe.decide("layers.0.attn.k_proj").scheme is None
    assert recipe.decide("layers.0.mlp.up_proj").scheme == UE5M3


def test_exclude_beats_include_and_include_beats_the_default():
    recipe = QuantRecipe(default=UE5M3, include=("mlp",), exclude=("down",))
    assert recipe.decide("mlp.up_proj").scheme == UE5M3
    assert recipe.decide("mlp.down_proj").scheme is None
    assert recipe.decide("attn.q_proj").scheme is None
    assert "excluded" in recipe.decide("mlp.down_proj").reason


def test_only_deliberate_decisions_count_as_named():
    recipe = QuantRecipe(rules=(Rule("q_proj", MXFP8),), default=UE5M3)
    assert recipe.decide("q_proj").named
    assert not recipe.decide("lm_head").named


def test_short_form_is_the_rules_themselves():
    recipe = QuantRecipe.from_dict(yaml.safe_load("q_proj|k_proj: mxfp8\nmlp: {scale: ue5m3, block: 32x32}\n"))
    assert [r.pattern for r in recipe.rules] == ["q_proj|k_proj", "mlp"]
    assert recipe.rules[1].scheme == QuantScheme(scale="ue5m3", block=(32, 32))
    assert recipe.default is None


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_round_trip(dump, tmp_path):
    recipe = QuantRecipe(
        rules=(Rule("a", MXFP8), Rule("b", None), Rule("c", QuantScheme(block=(8, 4), rounding="stochastic"))),
        default=QuantScheme.preset("nvfp4"),
        include=("x",),
        exclude=("y", "z"),
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe.to_dict()))
    assert QuantRecipe.from_file(file) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [1]", "pattern: scheme"),
        ("a: nope", "nope"),
        ("a: {scale: e5m9}", "e5m9"),
        ("a: {colour: red}", "colour"),
        ("default: mxfp4\nextra: 1", "extra"),
        ("'(': mxfp4", "regular expression"),
        ("just text", "mapping"),
        ("a: [unclosed", "recipe.yaml"),
    ],
)
def test_bad_recipes_are_named_in_one_line(text, message, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(SchemeError, match=message) as caught:
        QuantRecipe.from_file(file)
    assert "recipe.yaml" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
