"""Contiguous ranges of sample numbers.

When to use: samples lie in files in the order of their numbers. Each worker then reads its part of a step in
ascending order, from one end of the files' range and not from all over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, cut


@dataclass(frozen=True)
class Sequential(Partition):
    """Ranges of sample numbers, each in ascending order."""

    summary: ClassVar[str] = "ranges of sample numbers, each in ascending order"
    shares: str = ""

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del keys, seed
        return cut(np.sort(ids), weights)
