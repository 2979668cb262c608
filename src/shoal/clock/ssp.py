"""Stale synchronous: a worker may be a few steps ahead of the slowest, and no more.

When to use: workers that are slow now and then, each at other times. It does not help against one that always is: that
one gets fewer parts, as under every clock but bsp.
Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.clock.base import Clock
from shoal.errors import ConfigError


@dataclass(eq=False)
class Ssp(Clock):
    """Every part is an update; no read misses one that is more than `steps` steps old."""

    summary: ClassVar[str] = "nobody is more than so many steps ahead of the slowest"
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"ssp={self.steps}; a worker may be 0 or more steps ahead.")

    @property
    def bound(self) -> int:
        return self.steps
