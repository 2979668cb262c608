"""Dealt like cards: the first sample to the first part, the second to the second.

When to use: with shuffle=False, where neighbours in the data set are alike (sorted by class, or by time) and each
worker should see something of everything. With unequal shares the turns of a part are spread evenly over the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, hand_out, sizes


@dataclass(frozen=True)
class RoundRobin(Partition):
    """Samples are dealt to the parts in turn."""

    summary: ClassVar[str] = "samples are dealt to the parts in turn"
    shares: str = ""

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del keys, seed
        counts = sizes(len(ids), weights)
        # A part of n samples has its turns at 1/2n, 3/2n, ... of the deal; with equal weights, one after the other.
        turns = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
        owners = np.repeat(np.arange(len(counts)), counts)
        return hand_out(ids, owners[np.argsort(turns, kind="stable")], len(counts))
