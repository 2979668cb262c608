"""Dynamic stale synchronous: the staleness that is allowed follows the workers, between two bounds.

When to use: the right `ssp` is not known, or changes during the run. Workers of equal speed stay within `low` steps;
where some are slow, the others may get up to `high` steps ahead before they wait.
Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS 2019.

The paper predicts waiting times from the times of pushes. Here every copy of the ledger has to reach the same
decision, so it follows from the order of claims alone: when a step is over, and a worker had to wait since the last
one was, one step more is allowed; one less, if claims were granted and none was as far ahead as allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.clock.base import Clock
from shoal.errors import ConfigError


@dataclass(eq=False)
class Dssp(Clock):
    """Every part is an update; a worker may be `low` to `high` steps ahead of the slowest."""

    summary: ClassVar[str] = "as ssp, with a bound between low and high that grows while workers have to wait"
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"{self}: the bound moves from low up to high; use 0 <= low < high, or ssp=N.")
        self._extra = 0
        """Steps allowed beyond `low`."""
        self._furthest = -1
        """How far ahead a claim was granted since the last step was over; -1: none was."""
        self._waits = 0
        """Claims refused since the last step was over."""

    @property
    def bound(self) -> int:
        return self.high

    @property
    def allowed(self) -> int:
        """How many steps ahead a claim may be now."""
        return self.low + self._extra

    def may_begin(self, step: int, oldest: int) -> bool:
        return step - oldest <= self.allowed

    def granted(self, ahead: int) -> None:
        self._furthest = max(self._furthest, ahead)

    def refused(self) -> None:
        self._waits += 1

    def finished(self) -> None:
        if self._waits:
            self._extra = min(self._extra + 1, self.high - self.low)
        elif 0 <= self._furthest < self.allowed:
            self._extra = max(self._extra - 1, 0)
        self._furthest = -1
        self._waits = 0

    def state(self) -> list[int]:
        return [self._extra, self._furthest, self._waits]

    def restore(self, state: Sequence[int]) -> None:
        self._extra, self._furthest, self._waits = state
