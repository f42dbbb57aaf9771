"""Intervals are those of the bootstrap's own definition, and hold the mean as often as they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from mxquant.evals.intervals import FEWEST, bootstrap_interval, paired_error


def tail(count: int) -> float:
    """The share beyond either end for Hesterberg's expanded percentiles, by integrating the densities."""
    z = math.sqrt(count / (count - 1)) * stats.t(count - 1).isf(0.025)
    return stats.norm.sf(z)


def test_equals_the_enumeration_of_every_resample():
    values = np.array([0.3, 1.7, -0.4, 0.9, 0.2, 1.1])
    means = np.mean(list(itertools.product(values, repeat=6)), axis=1)  # 46,656 of them
    exact = np.quantile(means, [tail(6), 1 - tail(6)])
    found = bootstrap_interval(torch.tensor(values))
    assert np.abs(np.array(found) - exact).max() < 0.05 * (exact[1] - exact[0])


def test_agrees_with_scipys_bootstrap_at_the_widened_confidence():
    values = np.random.default_rng(3).lognormal(size=40)
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=1 - 2 * tail(40), n_resamples=20_000, method="percentile", random_state=1
    ).confidence_interval
    low, high = bootstrap_interval(torch.tensor(values))
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * (theirs.high - theirs.low))


@pytest.mark.parametrize(("count", "skew"), [(8, 0.0), (20, 0.0), (20, 0.5)])
def test_covers_the_mean_as_often_as_it_says(count, skew):
    generator = np.random.default_rng(count)
    hits = 0
    for _ in range(300):
        sample = generator.normal(size=count)
        values, mean = (np.exp(skew * sample), math.exp(skew**2 / 2)) if skew else (sample, 0.0)
        low, high = bootstrap_interval(torch.tensor(values))
        hits += low < mean < high
    assert 0.90 < hits / 300 < 0.98


def test_repeats_and_does_not_touch_anybodys_random_numbers():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert (np.random.get_state()[1] == before).all()


def test_too_few_values_have_no_interval_and_equal_ones_no_width():
    assert bootstrap_interval(torch.arange(FEWEST - 1.0)) is None
    low, high = bootstrap_interval(torch.full((FEWEST,), 2.5))
    assert (low, high) == (2.5, 2.5)


def test_more_confidence_is_wider():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 3.0])
    (a, d), (b, c) = bootstrap_interval(values, 0.99), bootstrap_interval(values, 0.8)
    assert a < b < c < d


def test_paired_error_is_that_of_mcnemar_for_right_and_wrong_answers():
    generator = np.random.default_rng(0)
    base = generator.integers(0, 2, 500)
    model = np.where(generator.random(500) < 0.1, 1 - base, base)
    gained, lost = int(((model == 1) & (base == 0)).sum()), int(((model == 0) & (base == 1)).sum())
    n = 500
    # Variance of the difference of two correlated proportions, from the discordant items alone.
    variance = ((gained + lost) - (gained - lost) ** 2 / n) / (n * (n - 1))
    assert paired_error(model.tolist(), base.tolist()) == pytest.approx(math.sqrt(variance))
    unpaired = math.hypot(*(x.std(ddof=1) / math.sqrt(n) for x in (base, model)))
    assert paired_error(model.tolist(), base.tolist()) < 0.6 * unpaired
    assert paired_error([1.0], [0.0]) is None
    assert paired_error([1.0, 0.0], [0.0]) is None
