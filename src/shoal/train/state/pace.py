"""How many steps lie between two snapshots, so that all of them together cost at most a hundredth of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.01
"""Of the training's time."""
FIRST = 4
"""So many steps are timed before the first snapshot."""


@dataclass
class Pace:
    """When the next snapshot is due. Every rank gives it the same numbers, and so decides alike.

    >>> pace = Pace(interval=1)
    >>> pace.begin(0)
    >>> pace.is_time(3), pace.is_time(4)
    (False, True)
    >>> pace.decide(4, cost=0.05, per_step=0.1)     # 0.05 s are a hundredth of 50 steps
    False
    >>> pace.is_time(49), pace.is_time(50), pace.decide(50, cost=0.05, per_step=0.1)
    (False, True, True)
    """

    interval: int
    """Snapshots are possible after multiples of so many steps."""
    last: int = 0
    """The step of the last snapshot, or at which training began."""
    next: int = -1
    """The step at which to look again; -1: training has not begun."""

    def begin(self, step: int) -> None:
        """Training goes on from this step, of which there is a copy, or none is needed."""
        self.last = step
        self.next = self._round(step + FIRST)

    def is_time(self, step: int) -> bool:
        """Whether all ranks shall compare their times after this step."""
        return step >= self.next >= 0 and step % self.interval == 0

    def decide(self, step: int, cost: float, per_step: float) -> bool:
        """Whether to take a snapshot now, given what one costs and how long a step takes, in seconds."""
        apart = max(1, math.ceil(cost / (SHARE * per_step))) if per_step > 0 else FIRST
        if step - self.last < apart:
            self.next = self._round(self.last + apart)
            return False
        self.last = step
        self.next = self._round(step + apart)
        return True

    def _round(self, step: int) -> int:
        return -(-step // self.interval) * self.interval
