"""How long a worker takes for one unit: from noisy steps to a level, or to a line.

Both take the steps of a window at a time and use their median, so that one step that was held up, by a page fault or by
another program, changes nothing. Noise is judged by the differences between neighbouring steps: a change of speed is in
one of them only.
"""

from __future__ import annotations

import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

MEDIAN = 1.25
"""The error of a median over that of a mean, for normal noise."""
DIFFERENCE = 1.05
"""Standard deviation of values whose neighbours differ by 1 in the median."""
PLAIN = 4.0
"""A deviation of so many errors is no noise: the speed has changed."""
SMALLEST_JUMP = 0.1
"""A smaller change is followed by smoothing."""
UNKNOWN_NOISE = 0.2
LEAST = 4
TREND = 4.0
"""A line needs so many windows, and a slope of so many errors."""
BEYOND = 2.0
"""The error of a line a little beyond its end, over that of the mean of its points."""


class Estimate(ABC):
    """Seconds a unit of one worker."""

    def __init__(self) -> None:
        self.known = False
        self._noise: float | None = None
        self._last: float | None = None

    def learn(self, at: float, costs: Sequence[float]) -> None:
        """The steps of a window: seconds a unit of each; `at`: the number of the last step."""
        middle = statistics.median(costs)
        beside = costs if self._last is None else [self._last, *costs]
        gaps = [abs(b - a) for a, b in itertools.pairwise(beside)]
        if gaps:
            found = DIFFERENCE * statistics.median(gaps) / middle
            self._noise = found if self._noise is None else 0.7 * self._noise + 0.3 * found
        self._last = costs[-1]
        noise = UNKNOWN_NOISE if self._noise is None else self._noise
        self._take(at, middle, MEDIAN * noise / math.sqrt(len(costs)))
        self.known = True

    @abstractmethod
    def _take(self, at: float, cost: float, error: float) -> None:
        """One window: its median, and the relative error of that."""

    @abstractmethod
    def cost(self, at: float) -> float:
        """Seconds a unit at a step to come."""

    @property
    @abstractmethod
    def error(self) -> float:
        """How far off that may be, relative to it."""

    def moved(self) -> None:
        """The worker gets another share from now on."""
        self._last = None


class Level(Estimate):
    """A running mean that becomes an exponentially weighted one; begins anew where the speed plainly changes."""

    def __init__(self, memory: int) -> None:
        """`memory`: windows that count."""
        super().__init__()
        self._memory = memory
        self._level = 0.0
        self._windows = 0
        self._error = 0.0

    def _take(self, at: float, cost: float, error: float) -> None:
        del at
        if self._windows and abs(cost - self._level) > self._level * max(SMALLEST_JUMP, PLAIN * error):
            self._windows = 0
        self._windows = min(self._windows + 1, self._memory)
        self._level += (cost - self._level) / self._windows
        self._error = error / math.sqrt(self._windows)

    def cost(self, at: float) -> float:
        del at
        return self._level

    @property
    def error(self) -> float:
        return self._error

    def moved(self) -> None:
        # A part of the time may be the same for any share; what was measured under the old share is then off.
        super().moved()
        self._windows = 0


class LinearEstimate(Estimate):
    """A straight line through the last windows, where they plainly have a trend; else their mean."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self._seen: deque[tuple[float, float]] = deque(maxlen=memory)
        self._error = 0.0

    def _take(self, at: float, cost: float, error: float) -> None:
        if self._seen:
            expected = self.cost(at)
            if abs(cost - expected) > expected * max(2 * SMALLEST_JUMP, PLAIN * error):
                self._seen.clear()
        self._seen.append((at, cost))
        self._error = error / math.sqrt(len(self._seen))

    def cost(self, at: float) -> float:
        centre, mean, slope = self._line()
        first, last = self._seen[0][0], self._seen[-1][0]
        ahead = min(at, 2 * last - first)  # not further than it has been seen
        return max(mean + slope * (ahead - centre), mean / 2)

    @property
    def error(self) -> float:
        return self._error * (1.0 if self._line()[2] == 0.0 else BEYOND)

    def _line(self) -> tuple[float, float, float]:
        """A step, the cost there, and how much it grows from step to step."""
        count = len(self._seen)
        centre = math.fsum(when for when, _ in self._seen) / count
        mean = math.fsum(cost for _, cost in self._seen) / count
        if count < LEAST:
            return centre, mean, 0.0
        spread = math.fsum((when - centre) ** 2 for when, _ in self._seen)
        slope = math.fsum((when - centre) * (cost - mean) for when, cost in self._seen) / spread
        rest = math.fsum((cost - mean - slope * (when - centre)) ** 2 for when, cost in self._seen)
        plain = abs(slope) > TREND * math.sqrt(rest / (count - 2) / spread)
        return centre, mean, slope if plain else 0.0
