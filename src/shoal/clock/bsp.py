"""Bulk synchronous: everybody waits for everybody, in every step.

When to use: equal workers, and whenever a run must compute what one process computes.
Valiant, "A Bridging Model for Parallel Computation", CACM 1990.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.clock.base import Clock
from shoal.types import Promise


class Bsp(Clock):
    """All parts of a step make one update; the next step begins after it."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "everybody waits for everybody in every step"
    together: ClassVar[bool] = True

    @property
    def bound(self) -> int:
        return 0
