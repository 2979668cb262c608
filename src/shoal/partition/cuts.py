"""From weights to sizes, and from sizes to parts: arithmetic that all partitions share."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError

Ids = npt.NDArray[np.int64]
"""Sample ids, or positions in the order: a one-dimensional int64 array."""

Weights = npt.NDArray[np.float64]
"""One number above 0 for each part."""


def split(count: int, parts: int, index: int) -> tuple[int, int]:
    """The contiguous share [start, stop) of `count` items that falls to part `index` of `parts`.

    Sizes differ by at most one, the longer ones first.

    >>> [split(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if count < 0:
        raise ConfigError(f"cannot split {count} items: the count must not be negative.")
    if not 0 <= index < parts:
        raise ConfigError(f"part {index} of {parts} does not exist; parts are counted from 0 to parts - 1.")
    size, longer = divmod(count, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def sizes(count: int, weights: Weights) -> list[int]:
    """How many of `count` items each part gets: its fair share, rounded up or down, in sum all of them.

    >>> sizes(10, np.array([1.0, 1.0, 1.0, 1.0])), sizes(10, np.array([2.0, 1.0]))
    ([3, 3, 2, 2], [7, 3])
    """
    if (weights == weights[0]).all():  # exact, where fractions would be rounded
        return [stop - start for start, stop in (split(count, len(weights), i) for i in range(len(weights)))]
    fair = weights * (count / weights.sum())
    whole = np.floor(fair).astype(np.int64)
    missing = count - int(whole.sum())
    # The largest remainders are rounded up; equal ones in the order of the parts, as `split` does.
    whole[np.argsort(whole - fair, kind="stable")[:missing]] += 1
    return [int(size) for size in whole]


def stretches(count: int, weights: Weights) -> list[tuple[int, int]]:
    """The contiguous stretch [start, stop) of each part.

    >>> stretches(10, np.array([2.0, 1.0, 1.0]))
    [(0, 5), (5, 8), (8, 10)]
    """
    return list(pairwise(accumulate(sizes(count, weights), initial=0)))


def cut(ids: Ids, weights: Weights) -> list[Ids]:
    """The ids, as they come, in contiguous parts."""
    return [ids[start:stop] for start, stop in stretches(len(ids), weights)]


def hand_out(ids: Ids, owners: npt.NDArray[np.intp], parts: int) -> list[Ids]:
    """The ids of each part, in the order they came, where `owners` says the part of each.

    >>> [part.tolist() for part in hand_out(np.array([7, 8, 9]), np.array([1, 0, 1]), 3)]
    [[8], [7, 9], []]
    """
    grouped = ids[np.argsort(owners, kind="stable")]
    bounds = pairwise(accumulate(np.bincount(owners, minlength=parts).tolist(), initial=0))
    return [grouped[start:stop] for start, stop in bounds]


def by_rank(ids: Ids, ranks: npt.NDArray[np.intp], weights: Weights) -> list[Ids]:
    """Part 0 gets the ids that come first in `ranks`, part 1 the next, and so on; each keeps the order they came in."""
    owners = np.empty(len(ids), dtype=np.intp)
    owners[ranks] = np.repeat(np.arange(len(weights)), sizes(len(ids), weights))
    return hand_out(ids, owners, len(weights))
