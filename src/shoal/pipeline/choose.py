"""Where to cut a row of costs, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def choose(costs: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """Where to cut a row of costs into this many stages, none empty, so that the largest time is as small as can be.

    A stage's time is the sum of its costs over its speed; without `speeds` all are alike. Gives the index of the first
    cost of each stage but the first. There are at least as many costs as stages.

    >>> choose([3, 1, 1, 1, 4, 2], 3), choose([1, 1, 1, 1, 1, 1], 2, speeds=[2, 1])
    ((3, 5), (4,))
    """
    rates = speeds or [1.0] * stages
    sums = [0.0, *itertools.accumulate(costs)]
    most = [
        [total / rates[0] for total in sums]
    ]  # most[k][i]: the largest if the first i costs make k + 1 stages
    cut: list[list[int]] = [[0] * len(sums)]
    for k in range(1, stages):
        row = [float("inf")] * len(sums)
        at = [0] * len(sums)
        for i in range(k + 1, len(sums)):
            at[i] = min(range(k, i), key=lambda j: max(most[k - 1][j], (sums[i] - sums[j]) / rates[k]))
            row[i] = max(most[k - 1][at[i]], (sums[i] - sums[at[i]]) / rates[k])
        most.append(row)
        cut.append(at)
    cuts: list[int] = []
    end = len(costs)
    for k in range(stages - 1, 0, -1):
        end = cut[k][end]
        cuts.insert(0, end)
    return tuple(cuts)
