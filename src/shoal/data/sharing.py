"""What each part of a step weighs, from which step on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.partition.cuts import Weights


class Sharing:
    """Weights that may change between steps; those of any step can be asked for again.

    >>> sharing = Sharing(np.array([1.0, 1.0]))
    >>> sharing.change(5, [3, 1])
    >>> [sharing.at(step)[1].tolist() for step in (4, 5)]
    [[1.0, 1.0], [3.0, 1.0]]
    """

    def __init__(self, weights: Weights) -> None:
        self._parts = len(weights)
        self._made = 0
        self._changes: list[tuple[int, int, Weights]] = [(0, 0, weights)]

    def change(self, step: int, shares: Sequence[float]) -> None:
        """From step `step` on, each worker's parts weigh this."""
        kept = [change for change in self._changes if change[0] < step]
        self._made += 1
        weights = np.repeat(np.array(shares, dtype=np.float64), self._parts // len(shares))
        self._changes = [*kept, (step, self._made, weights)]

    def at(self, step: int) -> tuple[int, Weights]:
        """The number of the change that holds in a step, and the weights."""
        for first, number, weights in reversed(self._changes):
            if step >= first:
                return number, weights
        return self._changes[0][1:]
