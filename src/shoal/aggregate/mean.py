"""Every part counts alike, however many samples it has.

When to use: parts differ in size for reasons that should not decide, such as workers whose own data are more or fewer.
Where parts are alike in size it is the plain sum, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.aggregate.base import Aggregate, with_samples


@dataclass(frozen=True)
class Mean(Aggregate):
    """The mean of the parts' own means, times the samples of all."""

    summary: ClassVar[str] = "the mean of the parts' means: every part counts alike"

    def combine(self, parts: Sequence[torch.Tensor], counts: Sequence[float], out: torch.Tensor) -> None:
        parts, counts = with_samples(parts, counts)
        out.zero_()
        for part, count in zip(parts, counts, strict=True):
            out.add_(part, alpha=sum(counts) / (len(counts) * count))
