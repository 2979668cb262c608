"""Shares that are fixed once: given, or from a short measurement at the beginning.

When to use: machines of different speed that stay as fast as they are. `static(shares=3/1)` repeats itself from run to
run; `static` measures the first steps, with even shares, and then decides once.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.balance.base import Balance, Basis, Fixed, Sharer, read_numbers
from shoal.balance.deal import deal
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Static(Balance):
    """Given shares, or those of a measurement at the beginning."""

    summary: ClassVar[str] = "shares=3/1 as given, or measured once in the first steps"
    shares: str = ""
    """What each worker should get relative to the others, joined by "/"; empty: measure."""
    steps: int = 10
    """Of the measurement."""
    most: str = ""
    """Samples that each worker may get at most, joined by "/"; one number is for all."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                f"static(steps={self.steps}): a measurement takes at least 1 step; 10 are good."
            )
        _ = self.given, self.limits

    @property
    def measures(self) -> bool:
        return not self.shares

    @property
    def given(self) -> tuple[float, ...]:
        return read_numbers("shares", self.shares, 1e-6)

    @property
    def limits(self) -> tuple[float, ...]:
        return read_numbers("most", self.most, 1)

    def start(self, basis: Basis) -> Sharer:
        if self.given:
            return Fixed(replace(basis, known=self.given))
        return Fixed(basis) if basis.known else Once(basis, self.steps)


class Once(Sharer):
    """Measures so many steps, then decides."""

    def __init__(self, basis: Basis, steps: int) -> None:
        super().__init__(basis)
        self._seen: list[list[float]] = [[] for _ in range(basis.workers)]
        self._left = steps

    @property
    def window(self) -> int:
        return self._left

    def observe(self, units: Sequence[float], seconds: Sequence[float]) -> None:
        for seen, had, took in zip(self._seen, units, seconds, strict=True):
            if had > 0 and took > 0:
                seen.append(took / had)
        self._left -= 1
        if self._left == 0:
            if not all(self._seen):  # somebody had no samples yet: look on
                self._left = 1
                return
            self.speeds = tuple(1.0 / statistics.median(seen) for seen in self._seen)
            self.shares = deal(self.speeds, self.basis.units, self.most)
