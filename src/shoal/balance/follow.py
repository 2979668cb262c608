"""Shares that follow measured speeds, with a dead band: they move only where it plainly pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.balance.base import Basis, Sharer
from shoal.balance.deal import deal, slowest
from shoal.balance.speed import Estimate

FIRST = 3
"""Steps of the first window: whoever is slow should not hold all up for long."""
DOUBT = 3.0
"""A gain must be larger than so many errors of what has been measured."""


class Follower(Sharer):
    """Looks at a window of steps at a time."""

    def __init__(self, basis: Basis, every: int, band: float, make: Callable[[], Estimate]) -> None:
        """`make`: what keeps the speed of a worker."""
        super().__init__(basis)
        self._every = every
        self._band = band
        self._estimates = [make() for _ in range(basis.workers)]
        self._seen: list[list[float]] = [[] for _ in range(basis.workers)]
        self._step = self._waiting = 0

    @property
    def window(self) -> int:
        first = self._step == self._waiting
        return (min(FIRST, self._every) if first else self._every) - self._waiting

    def observe(self, units: Sequence[float], seconds: Sequence[float]) -> None:
        ends = self.window == 1
        self._step += 1
        self._waiting += 1
        for seen, had, took in zip(self._seen, units, seconds, strict=True):
            if had > 0 and took > 0:  # who had nothing keeps the old estimate
                seen.append(took / had)
        if ends:
            for estimate, seen in zip(self._estimates, self._seen, strict=True):
                if seen:
                    estimate.learn(self._step, seen)
                seen.clear()
            self._waiting = 0
            self._decide()

    def _decide(self) -> None:
        if not all(estimate.known for estimate in self._estimates):
            return
        at = self._step + self.basis.lag + self._every / 2  # the middle of the steps that this decides about
        self.speeds = tuple(1.0 / estimate.cost(at) for estimate in self._estimates)
        wanted = deal(self.speeds, self.basis.units, self.most)
        doubt = DOUBT * max(estimate.error for estimate in self._estimates)
        needed = 1.0 - min(max(self._band, doubt), 0.5)
        too_much = any(share > max(1.0, limit) for share, limit in zip(self.shares, self.most, strict=True))
        gains = slowest(wanted, self.speeds) < needed * slowest(self.shares, self.speeds)
        if wanted != self.shares and (gains or too_much):
            self.shares = wanted
            for estimate in self._estimates:
                estimate.moved()
