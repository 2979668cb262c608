"""Who writes what: every element of the state once, and everybody about equally much. Pure arithmetic.

Each rank lists what it holds. What several ranks hold is cut among them if it is large, and given to the one with
the least to write if it is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.checkpoint.layout.region import Region

CUT_ABOVE = 2**20
"""Bytes: what is smaller is not worth cutting."""


@dataclass(frozen=True)
class Holding:
    """What a rank holds of a logical tensor."""

    path: str
    region: Region
    dtype: torch.dtype
    shared: bool = True
    """Whether others may write it in this rank's place: they have the same numbers."""


@dataclass(frozen=True)
class Write:
    """What a rank writes: a region of its holding number `holding`."""

    holding: int
    region: Region
    start: int
    """First element, counted in the holding."""


def assign(holdings: Sequence[Sequence[Holding]]) -> list[list[Write]]:
    """For each rank, what it writes of what it holds.

    >>> everything = Holding("parameter/w", Region.whole((1024, 1024)), torch.float32)
    >>> [[write.region.numel for write in writes] for writes in assign([[everything], [everything]])]
    [[524288], [524288]]
    """
    groups: dict[tuple[str, Region], list[tuple[int, int]]] = {}
    for rank, mine in enumerate(holdings):
        for number, holding in enumerate(mine):
            groups.setdefault((holding.path, holding.region), []).append((rank, number))
    load = [0] * len(holdings)
    writes: list[list[Write]] = [[] for _ in holdings]

    def give(holder: tuple[int, int], start: int, stop: int) -> None:
        rank, number = holder
        holding = holdings[rank][number]
        writes[rank].append(Write(number, holding.region.within(start, stop), start))
        load[rank] += (stop - start) * holding.dtype.itemsize

    small = []
    for (_, region), holders in groups.items():
        rank, number = holders[0]
        size = region.numel * holdings[rank][number].dtype.itemsize
        if len(holders) == 1 or not holdings[rank][number].shared:
            give(holders[0], 0, region.numel)
        elif size >= CUT_ABOVE:
            edges = [region.numel * i // len(holders) // 64 * 64 for i in range(len(holders))]
            for holder, start, stop in zip(holders, edges, [*edges[1:], region.numel], strict=True):
                give(holder, start, stop)
        else:
            small.append((size, holders, region.numel))
    for _, holders, numel in sorted(small, key=lambda entry: -entry[0]):
        give(min(holders, key=lambda holder: load[holder[0]]), 0, numel)
    return writes
