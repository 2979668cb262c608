"""Each step's samples are divided by lot.

When to use: with shuffle=False, where the order must stay as it is and workers should still get a random choice of each
step. The draw depends on the seed and on the place in the data, not on the number of restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, by_rank
from shoal.partition.hashes import mix


@dataclass(frozen=True)
class Random(Partition):
    """A keyed shuffle decides which part a sample goes to."""

    summary: ClassVar[str] = "a keyed shuffle decides which part a sample goes to"
    shares: str = ""

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del keys
        drawn = mix(mix(ids.astype(np.uint64)) ^ np.uint64(seed))
        return by_rank(ids, np.argsort(drawn, kind="stable"), weights)
