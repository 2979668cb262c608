"""Shares follow the speeds that are measured while the run goes on.

Each worker's seconds a sample are smoothed exponentially. Shares change between steps only, and only if a step becomes
faster by more than `band` and by more than the noise. A worker that suddenly is faster or slower is believed as
soon as it plainly is.

When to use: unequal machines, or machines that others use too.
Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments", SoCC 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.balance.base import Balance, Basis, Sharer, read_numbers
from shoal.balance.follow import Follower
from shoal.balance.speed import Level
from shoal.errors import ConfigError

MEMORY = 8
"""Windows that count."""


@dataclass(frozen=True)
class Dynamic(Balance):
    """By measured speeds, while the run goes on."""

    summary: ClassVar[str] = "follows measured speeds, with a dead band"
    divides_stages: ClassVar[bool] = False
    every: int = 5
    """Steps between two looks at the measurements."""
    band: float = 0.03
    """Shares stay where a step would become faster by less than this."""
    most: str = ""
    """Samples that each worker may get at most, joined by "/"; one number is for all."""

    def __post_init__(self) -> None:
        check(type(self).__name__.lower(), self.every, self.band)
        _ = self.limits

    @property
    def limits(self) -> tuple[float, ...]:
        return read_numbers("most", self.most, 1)

    def start(self, basis: Basis) -> Sharer:
        return Follower(basis, self.every, self.band, lambda: Level(MEMORY))


def check(name: str, every: int, band: float) -> None:
    """Refuse options that cannot work."""
    if every < 1 or not 0 <= band < 1:
        raise ConfigError(
            f"{name}(every={every}, band={band:g}): it looks every 1 or more steps, and band is a part of a step's "
            "time, from 0 to below 1."
        )
