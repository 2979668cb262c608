"""By a hash of a key: samples with equal keys meet in one part, in every step of every run.

When to use: each worker keeps something for each key (a cache, a user's history), and must meet the key again. Another
number of parts sends almost every key elsewhere; `consistent` does not. Sizes follow the keys: see the skew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.partition.base import OWN, Keys, Partition
from shoal.partition.cuts import Ids, Weights, hand_out
from shoal.partition.hashes import hash_keys, to_unit


@dataclass(frozen=True)
class Hash(Partition):
    """Equal keys always meet in the same part."""

    summary: ClassVar[str] = "by a hash of a key: equal keys always meet in the same part"
    counted: ClassVar[bool] = False
    key: str = OWN
    shares: str = ""

    @property
    def keyed_by(self) -> str:
        return self.key

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del seed
        edges = np.cumsum(weights) / weights.sum()
        owners = np.searchsorted(edges[:-1], to_unit(hash_keys(keys)), side="right")
        return hand_out(ids, owners, len(weights))
