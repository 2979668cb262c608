"""A number that is known only so well: where it should be, and between which others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A middle, and what it may be at least and at most.

    >>> print(Interval(0.9, 1.0, 1.2) + Interval(1.0, 1.0, 1.0))
    2 (1.9 to 2.2)
    """

    low: float
    middle: float
    high: float

    @staticmethod
    def exact(value: float) -> Interval:
        """A number that is known."""
        return Interval(value, value, value)

    @staticmethod
    def measured(values: Sequence[float]) -> Interval:
        """The median and the quartiles of what was measured.

        >>> Interval.measured([3.0, 1.0, 2.0])
        Interval(low=1.0, middle=2.0, high=3.0)
        """
        if len(values) == 1:
            return Interval.exact(values[0])
        low, middle, high = statistics.quantiles(values, n=4)
        return Interval(max(low, 0.0) if middle >= 0 else low, middle, high)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, factor: float) -> Interval:
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(low, self.middle * factor, high)

    def widened(self, share: float) -> Interval:
        """The same middle, and at least so large a share of it to both sides."""
        room = abs(self.middle) * share
        return Interval(min(self.low, self.middle - room), self.middle, max(self.high, self.middle + room))

    def at_least(self, floor: float) -> Interval:
        """The same, where nothing below `floor` can be.

        >>> Interval(-5.0, -2.0, 1.0).at_least(-1.0)
        Interval(low=-1.0, middle=-1.0, high=1.0)
        """
        return Interval(max(self.low, floor), max(self.middle, floor), max(self.high, floor))

    def __str__(self) -> str:
        return f"{self.middle:.3g} ({self.low:.3g} to {self.high:.3g})"


ZERO = Interval(0.0, 0.0, 0.0)
