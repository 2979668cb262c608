"""Stale synchronous: a worker may be a few steps ahead of the slowest, and no more.

When to use: workers that are slow now and then, each at other times. It does not help against one that always is: that
one gets fewer parts, as under every clock but bsp.
Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.clock.base import Clock
from shoal.types import Promise


class Ssp(Clock):
    """Every part is an update; no read misses one that is more than `ssp` steps old."""

    promise: ClassVar[Promise] = Promise.CONVERGES
    summary: ClassVar[str] = "nobody is more than ssp steps ahead of the slowest"
    together = False
    ahead = True
