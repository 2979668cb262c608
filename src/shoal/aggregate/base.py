"""The contract of an aggregate: from the gradients of a step's parts to one gradient.

A part's gradient is a sum over its samples, and what comes out is a sum over all samples of the step: whoever divides
by their number gets a mean, whichever aggregate it was. Servers that hold the same shard each run it for themselves, so
it is a pure function of what it is given, the same bit for bit wherever it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from shoal.types import Promise


class Aggregate(ABC):
    """A way to make one gradient from several. Each choice is a frozen dataclass of its own options."""

    promise: ClassVar[Promise] = Promise.CONVERGES
    summary: ClassVar[str]
    sums: ClassVar[bool] = False
    """True if it is the plain sum in the order of parts, so that parts may be added up as they come."""
    compares: ClassVar[bool] = False
    """True if it looks at several parts beside each other, and one alone tells it nothing."""

    @abstractmethod
    def combine(self, parts: Sequence[torch.Tensor], counts: Sequence[float], out: torch.Tensor) -> None:
        """Write the gradient into `out`, which is none of the parts. `counts[i]` samples went into `parts[i]`."""


def with_samples(
    parts: Sequence[torch.Tensor], counts: Sequence[float]
) -> tuple[list[torch.Tensor], list[float]]:
    """Only the parts that have samples: others say nothing about what a sample's gradient is."""
    kept = [(part, float(count)) for part, count in zip(parts, counts, strict=True) if count > 0]
    return [part for part, _ in kept], [count for _, count in kept]
