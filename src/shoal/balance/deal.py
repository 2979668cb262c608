"""Whole numbers of units by speed, so that the last worker is ready as early as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence


def deal(speeds: Sequence[float], units: int, most: Sequence[float]) -> tuple[int, ...]:
    """Units for each worker, in sum all of them: at least one each, at most `most`, none ready later than need be.

    Where the limits leave no room for all units, they are exceeded in proportion.

    >>> deal([3.0, 1.0], 16, [math.inf, math.inf]), deal([9.0, 1.0], 16, [math.inf, math.inf])
    ((12, 4), (15, 1))
    >>> deal([3.0, 1.0], 16, [10.0, math.inf]), deal([3.0, 1.0], 16, [4.0, 4.0])
    ((10, 6), (8, 8))
    """
    caps = [max(1, math.floor(min(limit, units))) for limit in most]
    if sum(caps) < units:
        return deal([float(cap) for cap in caps], units, [math.inf] * len(caps))
    low, high = 0.0, units / min(speeds)
    for _ in range(64):  # the time in which units fit exactly, were they divisible
        middle = (low + high) / 2
        fair = [min(max(1.0, speed * middle), cap) for speed, cap in zip(speeds, caps, strict=True)]
        low, high = (low, middle) if math.fsum(fair) >= units else (middle, high)
    dealt = [min(max(1, math.floor(speed * low)), cap) for speed, cap in zip(speeds, caps, strict=True)]
    while sum(dealt) < units:  # fewer than there are workers
        open_ = [i for i, cap in enumerate(caps) if dealt[i] < cap]
        dealt[min(open_, key=lambda i: (dealt[i] + 1) / speeds[i])] += 1
    return tuple(dealt)


def slowest(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """When the last worker is ready.

    >>> slowest([8, 8], [2.0, 1.0])
    8.0
    """
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))
