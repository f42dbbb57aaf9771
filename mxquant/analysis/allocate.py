"""Which option each item gets, so that the total error is least and all sizes together fit a budget.

The multiple-choice knapsack problem. :func:`allocate` solves it in three steps, as Dyer and others do:

1. The lower convex hull of each item's (size, error) options. All items start at their smallest
   option and take the steps along their hulls in the order of error saved per byte. Where the
   budget ends, the slope of the step is the price of a byte, and Lagrange's bound says how far from
   the best this can be.
2. Options that cost more than that distance at that price cannot be part of a better answer.
3. What is left, usually a few items, is solved by dynamic programming over (size, error) pairs that
   no other pair beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mxquant.errors import MXQuantError

# Pairs kept in step 3. Beyond these the best by price are kept; `bound` still says how good the answer is.
_MAX_STATES = 100_000


@dataclass(frozen=True)
class Option:
    """One way to treat an item: its size (bits, or any whole unit) and its error."""

    size: int
    error: float


@dataclass(frozen=True)
class Allocation:
    """``picks``: the index of each item's option. ``bound``: no allocation within the budget has less error."""

    picks: tuple[int, ...]
    size: int
    error: float
    bound: float


def allocate(items: Sequence[Sequence[Option]], budget: int) -> Allocation:
    """One option for each item, with the least total error among those of total size ``budget`` or less.

    Raises ``MXQuantError`` if even the smallest options do not fit.
    """
    smallest = sum(min(o.size for o in options) for options in items)
    if smallest > budget:
        raise MXQuantError(f"the smallest options need {smallest}, more than the budget of {budget}")
    picks, price = _greedy(items, budget)
    # Lagrange: at any price, the sum of what each item would pick on its own is a lower bound.
    costs = [np.array([o.error + price * o.size for o in options]) for options in items]
    bound = sum(float(c.min()) for c in costs) - price * budget
    size, error = _total(items, picks)
    slack = error - bound
    if slack > 1e-12 * abs(error):
        # A hair more than the slack, so that rounding does not drop the answer itself.
        kept = [np.flatnonzero(c - c.min() <= slack * (1 + 1e-9)) for c in costs]
        better = _exact(items, kept, budget, price, bound, error)
        if better is not None:
            picks = better
            size, error = _total(items, picks)
    return Allocation(tuple(picks), size, error, min(bound, error))


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the lower convex hull, by size: each step saves less error per size than the one before."""
    order = sorted(range(len(options)), key=lambda i: (options[i].size, options[i].error))
    corners: list[int] = []
    for i in order:
        if corners and options[i].error >= options[corners[-1]].error:
            continue
        while len(corners) > 1 and _slope(options, corners[-2], corners[-1]) <= _slope(options, corners[-2], i):
            corners.pop()
        corners.append(i)
    return corners


def _slope(options: Sequence[Option], a: int, b: int) -> float:
    """Error saved per size on the way from ``a`` to the larger ``b``."""
    return (options[a].error - options[b].error) / (options[b].size - options[a].size)


def _greedy(items: Sequence[Sequence[Option]], budget: int) -> tuple[list[int], float]:
    """Picks that fit, and the price of size at which the budget ends."""
    hulls = [hull(options) for options in items]
    picks = [corners[0] for corners in hulls]
    left = budget - _total(items, picks)[0]
    steps = [(_slope(items[k], a, b), k, b) for k, corners in enumerate(hulls) for a, b in pairwise(corners)]
    # Slopes fall along a hull, so that an item's steps come in order.
    steps.sort(key=lambda step: -step[0])
    price, blocked = 0.0, set()
    for slope, k, b in steps:
        grown = items[k][b].size - items[k][picks[k]].size
        if k in blocked or grown > left:
            price = price or slope
            blocked.add(k)
            continue
        picks[k] = b
        left -= grown
    return picks, price


def _exact(
    items: Sequence[Sequence[Option]],
    kept: list[np.ndarray],
    budget: int,
    price: float,
    bound: float,
    known: float,
) -> list[int] | None:
    """Picks with less error than ``known``, the least possible unless there are too many states; None if none."""
    fixed = [k for k, indices in enumerate(kept) if len(indices) == 1]
    free = [k for k, indices in enumerate(kept) if len(indices) > 1]
    size = np.array([sum(items[k][kept[k][0]].size for k in fixed)], dtype=np.int64)
    error = np.array([sum(items[k][kept[k][0]].error for k in fixed)])
    # What the items still to come cost at the least, at the price of size, and how small they can be.
    rest = [min(items[k][i].error + price * items[k][i].size for i in kept[k]) for k in free]
    room = [min(items[k][i].size for i in kept[k]) for k in free]
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for n, k in enumerate(free):
        options = [items[k][i] for i in kept[k]]
        count = len(size)
        size = np.concatenate([size + o.size for o in options])
        error = np.concatenate([error + o.error for o in options])
        least = error + price * (size - budget) + sum(rest[n + 1 :])
        alive = (size + sum(room[n + 1 :]) <= budget) & (least < known - 1e-12 * abs(known))
        index = np.flatnonzero(alive)
        index = index[np.lexsort((error[index], size[index]))]
        # Larger pairs must have less error than all smaller ones.
        if len(index):
            before = np.minimum.accumulate(np.concatenate(([np.inf], error[index][:-1])))
            index = index[error[index] < before]
        if len(index) > _MAX_STATES:
            index = np.sort(index[np.argpartition(least[index], _MAX_STATES)[:_MAX_STATES]])
        if not len(index):
            return None
        history.append((index % count, kept[k][index // count]))
        size, error = size[index], error[index]
    state = int(np.argmin(error))
    if error[state] >= known:
        return None
    picks = [int(indices[0]) for indices in kept]
    for k, (parents, choices) in zip(reversed(free), reversed(history), strict=True):
        picks[k] = int(choices[state])
        state = int(parents[state])
    return picks


def _total(items: Sequence[Sequence[Option]], picks: Sequence[int]) -> tuple[int, float]:
    chosen = [options[i] for options, i in zip(items, picks, strict=True)]
    return sum(o.size for o in chosen), sum(o.error for o in chosen)
