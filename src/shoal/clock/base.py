"""The contract of a clock: how far apart workers may be, and whether a step's parts make one update."""

from __future__ import annotations

from typing import ClassVar

from shoal.types import Promise


class Clock:
    """How stale a worker's parameters may be."""

    promise: ClassVar[Promise]
    summary: ClassVar[str]
    together: ClassVar[bool]
    """True if all parts of a step make one update; False if each part makes one as soon as it is there."""
    ahead: ClassVar[bool]
    """Whether workers may be ahead of the slowest at all."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    @property
    def window(self) -> int:
        """How many steps a worker may be ahead of the slowest; -1: any number."""
        return self.steps if self.ahead else 0
