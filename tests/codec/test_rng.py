"""The random bits of stochastic rounding: defined by integers, the same everywhere, random enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mxquant.codec.rng import derive_key, random_bits24

MASK = 0xFFFFFFFF
FROZEN_KEY = 0xDE862FBA6AA066DB
FROZEN_BITS = [5159614, 15229937, 14157303, 6039946]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= x >> 15
    x = x * 0xD35A2D97 & MASK
    return x ^ x >> 15


def reference(key: int, index: int) -> int:
    """The formula of the module's docstring in Python's unbounded integers."""
    low, high = key & MASK, key >> 32
    i_low, i_high = index & MASK, index >> 32
    inner = mix(i_low ^ low)
    return mix((inner + (high ^ (i_high * 0x9E3779B9 & MASK))) & MASK) >> 8


def bits(key: int, start: int, count: int) -> np.ndarray:
    return random_bits24(key, torch.arange(start, start + count)).numpy()


def test_bits_equal_the_integer_formula_far_beyond_32_bits():
    rng = np.random.default_rng(0)
    borders = [base + d for base in (0, 2**31, 2**32, 5 * 2**32, 2**45, 2**62) for d in (-2, -1, 0, 1, 2)]
    indices = [i for i in borders if i >= 0] + rng.integers(0, 2**63, 3000).tolist()
    index = torch.tensor(indices, dtype=torch.int64)
    for key in (0, 1, 0xFFFFFFFFFFFFFFFF, 0x80000000, 0x8000000000000000, derive_key(0, "model.layers.0.mlp")):
        assert random_bits24(key, index).tolist() == [reference(key, i) for i in indices]


def test_bits_do_not_depend_on_how_indices_are_grouped():
    key = derive_key(7, "w")
    whole = bits(key, 2**32 - 5000, 10000)
    parts = [bits(key, 2**32 - 5000 + start, 37) for start in range(0, 9990, 37)]
    assert np.array_equal(whole[:9990], np.concatenate(parts))
    square = random_bits24(key, torch.arange(10000).view(100, 100).t())
    assert np.array_equal(square.t().reshape(-1).numpy(), bits(key, 0, 10000))


def test_bits_have_24_bits_and_use_them_all():
    x = bits(derive_key(3, "w"), 0, 1 << 20)
    assert x.min() >= 0
    assert x.max() < 1 << 24
    assert np.bitwise_or.reduce(x) == (1 << 24) - 1
    ones = (x[:, None] >> np.arange(24) & 1).mean(0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / 2**10


def test_keys_depend_on_seed_and_every_name_and_on_their_borders():
    parts = [(0,), (1,), (-1,), (0, "a"), (0, "b"), (0, "a", "b"), (0, "ab"), (0, "a", 1), (0, "a", 11), (0, "a1")]
    keys = [derive_key(*p) for p in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 2**64 for k in keys)
    # Frozen, because checkpoints made with a seed must be reproducible by later versions.
    assert derive_key(0, "weight") == FROZEN_KEY
    assert bits(FROZEN_KEY, 0, 4).tolist() == FROZEN_BITS


def chi_square_p(counts: np.ndarray) -> float:
    return float(stats.chisquare(counts.reshape(-1)).pvalue)


# Each p-value below is one number of a fixed computation: it does not change from run to run.
@pytest.mark.parametrize("key", [0, derive_key(0, "weight"), derive_key(1, "weight")])
@pytest.mark.parametrize("shift", [0, 8, 16], ids=["low", "middle", "high"])
def test_each_byte_is_uniform(key, shift):
    x = bits(key, 0, 1 << 20) >> shift & 0xFF
    assert 1e-4 < chi_square_p(np.bincount(x, minlength=256)) < 1 - 1e-4


@pytest.mark.parametrize("lag", [1, 2, 16, 32, 4096, 1 << 20])
def test_elements_are_independent_of_their_neighbours(lag):
    key = derive_key(0, "weight")
    a, b = bits(key, 0, 1 << 19) >> 19, bits(key, lag, 1 << 19) >> 19
    assert chi_square_p(np.bincount(a * 32 + b, minlength=1024)) > 1e-4
    a, b = bits(key, 0, 1 << 19) & 31, bits(key, lag, 1 << 19) & 31
    assert chi_square_p(np.bincount(a * 32 + b, minlength=1024)) > 1e-4


@pytest.mark.parametrize(
    "other",
    [derive_key(1, "weight"), derive_key(0, "weight2"), derive_key(0, "weight") ^ 1],
    ids=["seed", "name", "bit"],
)
def test_streams_of_two_keys_are_independent(other):
    a, b = bits(derive_key(0, "weight"), 0, 1 << 19), bits(other, 0, 1 << 19)
    assert (a == b).mean() < 1e-5
    assert chi_square_p(np.bincount((a >> 19) * 32 + (b >> 19), minlength=1024)) > 1e-4


def test_the_upper_half_of_an_index_gives_an_independent_stream():
    key = derive_key(0, "weight")
    a, b = bits(key, 0, 1 << 19), bits(key, 2**32, 1 << 19)
    assert (a == b).mean() < 1e-5
    assert chi_square_p(np.bincount((a >> 19) * 32 + (b >> 19), minlength=1024)) > 1e-4
