"""By length: samples of like length meet in one micro-batch, so that little padding is needed.

When to use: texts or recordings that are padded to the longest of their micro-batch. Within each `window` of global
batches the samples are sorted by length, cut into batches, and the batches are visited in random order; then each batch
is cut into parts by length. A larger window pads less and mixes less. Every sample still comes once an epoch.

The order inside a window is that of Khomenko et al., *Accelerating Recurrent Neural Network Training Using Sequence
Bucketing*, 2016, with buckets that are whole batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.errors import ConfigError
from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, cut

MOST_BATCHES = 2**20


@dataclass(frozen=True)
class BucketPartition(Partition):
    """Samples of like length meet, in the order and in the parts of a batch."""

    summary: ClassVar[str] = "by length, so that micro-batches need little padding"
    numbers: ClassVar[bool] = True
    length: str = "length"
    """Of the column that holds lengths."""
    window: int = 64
    """Global batches that are sorted together."""
    shares: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= MOST_BATCHES:
            raise ConfigError(
                f"bucket: window={self.window} should be a number of global batches from 1 to {MOST_BATCHES}; 64 is a "
                "good one."
            )

    @property
    def keyed_by(self) -> str:
        return self.length

    @property
    def reach(self) -> int:
        return self.window

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del seed
        return cut(ids[np.argsort(keys, kind="stable")], weights)
