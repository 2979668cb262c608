"""Contiguous blocks of the order as it comes. The default.

When to use: whenever nothing speaks for another. Each worker gets one stretch of the step's samples; where the order is
shuffled, that is as random as any other choice, and it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, cut, stretches


@dataclass(frozen=True)
class BlockPartition(Partition):
    """Contiguous blocks of the order as it comes."""

    summary: ClassVar[str] = "contiguous blocks of the order as it comes"
    shares: str = ""

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del keys, seed
        return cut(ids, weights)

    def cuts(self, count: int, weights: Weights) -> list[tuple[int, int]]:
        return stretches(count, weights)
