"""How many workers there are under `--workers 2:4`: fewer after a worker was lost again and again, all after a while.

Only whole numbers of replicas work: the strategy says which. What it cannot shrink to is passed over, and where nothing
smaller works, all start again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.errors import ConfigError, Loss

COOL_SECONDS = 60.0
"""After so long a place that was given up is tried again."""


@dataclass
class Size:
    """How many workers a job has on this host, and may have.

    >>> size = Size(now=4, least=2, most=4)
    >>> lost = Loss("worker 3 was killed", 3, "SIGKILL", plan="ddp * tp2")
    >>> size.shrink(lost, other=None), size.shrink(lost, other=lost), size.now
    (False, True, 2)
    """

    now: int
    least: int
    most: int
    since: float = 0.0
    """When it became smaller."""

    def shrink(self, loss: Loss, other: Loss | None) -> bool:
        """Give up a place if the same worker was lost before, in `other`, and fewer can go on; whether it did."""
        if other is None or other.rank != loss.rank:
            return False
        smaller = next((n for n in range(self.now - 1, self.least - 1, -1) if works(loss.plan, n)), None)
        if smaller is None:
            return False
        self.now = smaller
        self.since = time.monotonic()
        return True

    @property
    def grows_in(self) -> float | None:
        """Seconds until all places are tried again; None where all are taken."""
        return None if self.now == self.most else max(0.0, self.since + COOL_SECONDS - time.monotonic())

    def grow(self) -> None:
        """Take all places."""
        self.now = self.most


def works(plan: str, workers: int) -> bool:
    """Whether a strategy can work with so many workers; not known where there is none yet.

    >>> works("ddp * tp2", 3), works("ddp * tp2", 2), works("", 2)
    (False, True, False)
    """
    from shoal.plan.check import check_text  # with torch, which the launcher has by now

    try:
        check_text(plan, workers)
    except ConfigError:
        return False
    return bool(plan)


def parse_workers(text: str) -> tuple[int, int]:
    """The least and the most workers of `--workers`.

    >>> parse_workers("4"), parse_workers("2:4")
    ((4, 4), (2, 4))
    """
    least, colon, most = text.partition(":")
    numbers = (least, most if colon else least)
    if not all(number.strip().lstrip("-").isdigit() for number in numbers):
        raise ConfigError(f"--workers {text} is no number; write 4, or 2:4 for at least 2 and at most 4.")
    low, high = (int(number) for number in numbers)
    if low > high:
        raise ConfigError(f"--workers {text}: the least comes first, as in 2:4.")
    if low < 1:
        raise ConfigError(f"--workers {text} is too few; it must be at least 1.")
    return low, high
