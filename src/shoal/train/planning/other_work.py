"""How much else the machine did while something was measured on it: times are worth as much as it was idle."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil

from shoal.world.world import World

SOME = 0.25
"""Cores, from which it is said."""


@dataclass(frozen=True)
class OtherWork:
    """Begins to look when it is made.

    >>> OtherWork().cores(World.alone()) >= 0.0
    True
    """

    began: float = field(default_factory=time.monotonic)
    busy: float = field(default_factory=lambda: _busy())
    own: float = field(default_factory=time.process_time)

    def cores(self, world: World) -> float:
        """Cores that were busy with anything but the workers of `world`, all of this host. Collective."""
        ours = sum(float(one) for one in world.gather_values(time.process_time() - self.own))
        seconds = max(1e-3, time.monotonic() - self.began)
        return max(0.0, (_busy() - self.busy - ours) / seconds)


def said(cores: float, of: int) -> str:
    """What a table of times has to say of it; nothing where that is little.

    >>> said(1.31, 2)
    'other work kept 1.3 of 2 cores busy meanwhile: times are those of such a machine'
    >>> said(0.1, 2)
    ''
    """
    if cores < SOME:
        return ""
    return f"other work kept {min(cores, of):.1f} of {of} cores busy meanwhile: times are those of such a machine"


def _busy() -> float:
    """Seconds in which cores of this host have worked so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
