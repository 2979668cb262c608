"""What is free from now on: steps in time, in three amounts at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from shoal.jobs.local.state import Amount


class Profile:
    """Free cores, memory and devices over time.

    >>> profile = Profile((4, 100, 0), now=0.0)
    >>> profile.take((3, 0, 0), 0.0, 50.0)
    >>> profile.fits((2, 0, 0), 0.0, 10.0), profile.earliest((2, 0, 0), 10.0)
    (False, 50.0)
    """

    def __init__(self, capacity: Amount, now: float) -> None:
        self._times = [now]
        """Where the free amounts change; each holds until the next, the last one for ever."""
        self._free = [capacity]

    @property
    def now(self) -> Amount:
        """What is free at once."""
        return self._free[0]

    def take(self, amount: Amount, start: float, end: float) -> None:
        """Less of it is free from `start` to `end`. A negative amount gives back."""
        first, last = self._split(start), self._split(end)
        for place in range(first, last):
            free = self._free[place]
            self._free[place] = (free[0] - amount[0], free[1] - amount[1], free[2] - amount[2])

    def give(self, amount: Amount, start: float, end: float) -> None:
        """More of it is free from `start` to `end`."""
        self.take((-amount[0], -amount[1], -amount[2]), start, end)

    def fits(self, amount: Amount, start: float, seconds: float) -> bool:
        """Whether so much is free from `start` on for so long."""
        first = max(0, bisect_right(self._times, start) - 1)
        last = bisect_left(self._times, start + seconds, first + 1)
        cores, memory, devices = amount
        steps = self._free[first:last]
        return all(free[0] >= cores and free[1] >= memory and free[2] >= devices for free in steps)

    def earliest(self, amount: Amount, seconds: float) -> float | None:
        """The first time from which so much is free for so long; None: never."""
        return next((time for time in self._times if self.fits(amount, time, seconds)), None)

    def _split(self, time: float) -> int:
        """The place of a step that begins at `time`, made if there is none; times before now are now."""
        if time <= self._times[0]:
            return 0
        place = bisect_left(self._times, time)
        if place == len(self._times) or self._times[place] != time:
            self._times.insert(place, time)
            self._free.insert(place, self._free[place - 1])
        return place
