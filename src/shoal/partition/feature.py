"""By the value of a column: within a step, all samples with one value go to one part, and parts are balanced.

When to use: what is computed for a value (a shared prompt, a graph, a large image that several samples refer to) should
be computed once. The largest groups are placed first, each where it leaves the part least loaded for its weight. Which
part a value goes to may change from step to step; `hash` keeps it, at the price of balance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.partition.base import Keys, Partition
from shoal.partition.cuts import Ids, Weights, hand_out


@dataclass(frozen=True)
class Feature(Partition):
    """Samples with one value go to one part; the largest groups are placed first."""

    summary: ClassVar[str] = "by the value of a column, balanced: within a step one value is in one part"
    counted: ClassVar[bool] = False
    column: str
    shares: str = ""

    @property
    def keyed_by(self) -> str:
        return self.column

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del seed
        values, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
        part_of = np.empty(len(values), dtype=np.intp)
        load = np.zeros(len(weights))
        for value in np.argsort(-counts, kind="stable"):  # equal ones in the order of their values
            part = np.argmin((load + counts[value]) / weights)
            part_of[value] = part
            load[part] += counts[value]
        return hand_out(ids, part_of[which], len(weights))
