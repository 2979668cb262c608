"""Shares for the speeds that workers will have: a straight line through what was measured is drawn on.

When to use: machines whose speed drifts for longer than a few dozen steps: one that grows warm, one on which other work
comes and goes slowly. Where there is no trend it does what `dynamic` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.balance.base import Basis, Sharer
from shoal.balance.dynamic import MEMORY, Dynamic
from shoal.balance.follow import Follower
from shoal.balance.speed import LinearEstimate


@dataclass(frozen=True)
class Predict(Dynamic):
    """By the trend of measured speeds."""

    summary: ClassVar[str] = "extrapolates the trend of measured speeds"

    def start(self, basis: Basis) -> Sharer:
        return Follower(basis, self.every, self.band, lambda: LinearEstimate(MEMORY))
