"""The knapsack of schemes and bits against exhaustive search and scipy's solvers, and recipes that say its answer."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import yaml
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from mxquant.analysis.allocate import Option, allocate, hull
from mxquant.analysis.places import place, short_names
from mxquant.analysis.recipes import compact_recipe, to_yaml
from mxquant.errors import MXQuantError
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

SCHEMES = [QuantScheme.parse(text) for text in ("ue5m3/16", "ue5m3/8", "mxfp6", "nvfp4")]


def random_items(draw: random.Random, items: int, options: int, sizes: int = 12) -> list[list[Option]]:
    """Options of small whole sizes, so that ties, dominated ones and tight budgets come often."""
    return [[Option(draw.randint(1, sizes), draw.random()) for _ in range(options)] for _ in range(items)]


def least_error(items: list[list[Option]], budget: int) -> float:
    totals = ((sum(o.size for o in c), sum(o.error for o in c)) for c in itertools.product(*items))
    return min(error for size, error in totals if size <= budget)


def test_no_allocation_is_better_on_small_cases():
    draw = random.Random(0)
    for _ in range(300):
        items = random_items(draw, items=draw.randint(1, 5), options=draw.randint(1, 5))
        low, high = (sum(pick(o.size for o in options) for options in items) for pick in (min, max))
        budget = draw.randint(low, high)
        found = allocate(items, budget)
        chosen = [options[i] for options, i in zip(items, found.picks, strict=True)]
        assert found.size == sum(o.size for o in chosen) <= budget
        assert found.error == pytest.approx(sum(o.error for o in chosen))
        assert found.error == pytest.approx(least_error(items, budget))
        assert found.bound <= found.error


@pytest.mark.parametrize("seed", range(4))
def test_large_cases_are_solved_like_integer_programs(seed):
    draw = random.Random(seed)
    sizes = (4250, 4500, 5000, 6250, 8250)
    # Tensors of several sizes; errors fall with bits as rounding's do, and some schemes are worse than smaller ones.
    items = [
        [Option(n * s, weight * 4.0 ** (-s / 1000) * draw.uniform(0.7, 1.4)) for s in sizes]
        for n, weight in ((draw.choice((3, 9, 24)), draw.lognormvariate(0, 1)) for _ in range(120))
    ]
    budget = int(4.6 / 4.25 * sum(options[0].size for options in items))
    found = allocate(items, budget)
    assert found.size <= budget
    flat = [(k, o) for k, options in enumerate(items) for o in options]
    one_each = np.array([[k == row for k, _ in flat] for row in range(len(items))], dtype=float)
    errors, weights = np.array([o.error for _, o in flat]), np.array([[o.size for _, o in flat]], dtype=float)
    limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(weights, 0, budget)]
    exact = milp(
        errors, constraints=limits, integrality=np.ones(len(flat)), bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-9}
    )
    assert found.error == pytest.approx(exact.fun, rel=1e-6)
    relaxed = linprog(errors, weights, [budget], one_each, np.ones(len(items)), bounds=(0, 1))
    assert found.bound == pytest.approx(relaxed.fun, rel=1e-6)


def test_the_hull_has_falling_slopes_and_nothing_lies_below_it():
    draw = random.Random(1)
    for _ in range(200):
        (options,) = random_items(draw, 1, 8)
        corners = [options[i] for i in hull(options)]
        slopes = [(a.error - b.error) / (b.size - a.size) for a, b in itertools.pairwise(corners)]
        assert slopes == sorted(slopes, reverse=True)
        assert all(slope > 0 for slope in slopes)
        for o in options:
            at = np.interp(o.size, [c.size for c in corners], [c.error for c in corners], left=np.inf)
            assert o.error >= at - 1e-12 or o.size < corners[0].size


def test_a_budget_that_nothing_fits_is_an_error_and_a_large_one_takes_the_best_of_all():
    items = [[Option(4, 1.0), Option(8, 0.1)], [Option(4, 1.0), Option(8, 0.2)]]
    with pytest.raises(MXQuantError, match="more than the budget of 7"):
        allocate(items, 7)
    assert allocate(items, 8).picks == (0, 0)
    assert allocate(items, 12).picks == (1, 0)
    found = allocate(items, 100)
    assert (found.picks, found.error) == ((1, 1), pytest.approx(0.3))
    assert found.bound == pytest.approx(0.3)


NAMES = [
    *(f"model.layers.{i}.{p}" for i in range(12) for p in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")),
    *(f"model.layers.{i}.moe.experts.{e}.w1" for i in range(2) for e in range(12)),
    *(f"vision.blocks.{i}.mlp.{j}" for i in range(2) for j in (0, 2)),
    "lm_head",
]
OTHERS = ["model.embed_tokens", "model.norm", "model.layers.0.norm", "model.layers.1.mlp.gate"]


def test_a_recipe_gives_every_module_the_scheme_chosen_for_it():
    draw = random.Random(2)
    for count in (1, 2, 3, 4) * 10:
        chosen = {name: draw.choice(SCHEMES[:count]) for name in NAMES}
        recipe = compact_recipe(chosen, OTHERS)
        read = QuantRecipe.from_dict(yaml.safe_load(to_yaml(recipe, "made by a test\nin two lines")))
        assert read == recipe
        assert all(read.decide(name).scheme == scheme for name, scheme in chosen.items())
        assert not any(read.decide(name).named for name in OTHERS)


def test_a_recipe_is_as_short_as_what_it_says():
    chosen = {f"model.layers.{i}.{p}": SCHEMES[0] for i in range(12) for p in ("mlp.up", "mlp.down", "attn.q")}
    assert compact_recipe(chosen).rules == ()
    chosen |= {f"model.layers.{i}.{p}": SCHEMES[1] for i in range(12) for p in ("mlp.up", "mlp.down")}
    chosen["model.layers.3.attn.q"] = SCHEMES[2]
    recipe = compact_recipe(chosen)
    assert [r.pattern for r in recipe.rules] == [r"\blayers\.3\.attn\.q$", r"\battn\.q$"]
    assert recipe.default == SCHEMES[1]


def test_names_that_short_patterns_confuse_are_written_out():
    chosen = {f"{tower}.layers.{i}.q": SCHEMES[0] for tower in ("vision", "text") for i in range(3)}
    chosen["text.layers.1.q"] = SCHEMES[1]
    recipe = compact_recipe(chosen)
    assert [r.pattern for r in recipe.rules] == [re.escape("text.layers.1.q").join(("^", "$"))]


def test_places_and_names_of_projections():
    assert place("model.layers.11.mlp.up_proj") == (11, "mlp.up_proj")
    assert place("h.3.moe.experts.7.w1") == (3, "moe.experts.*.w1")
    assert place("lm_head") == (None, "lm_head")
    names = short_names(["attn.c_proj", "mlp.c_proj", "mlp.c_fc", "mlp.c_fc"])
    assert names == {"attn.c_proj": "attn.c_proj", "mlp.c_proj": "mlp.c_proj", "mlp.c_fc": "c_fc"}
