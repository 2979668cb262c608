"""The plain sum: every sample counts alike. The default.

When to use: whenever workers can be trusted. It is what one process computes from the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.aggregate.base import Aggregate
from shoal.types import Promise
from shoal.world.shm.memory import put


@dataclass(frozen=True)
class Weighted(Aggregate):
    """Parts are added up in their order, so that each weighs as much as it has samples."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "the plain sum: every sample counts alike"
    sums: ClassVar[bool] = True

    def combine(self, parts: Sequence[torch.Tensor], counts: Sequence[float], out: torch.Tensor) -> None:
        del counts
        if not parts:
            out.zero_()
            return
        put(out, parts[0])
        for part in parts[1:]:
            out.add_(part)
