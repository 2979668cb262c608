"""The median of the parts' mean gradients, element by element.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
When to use: some workers may send nonsense, by defect or on purpose. As long as they are fewer than half, no element
leaves the range of what the others sent. The price is noise: most of what each worker found is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.aggregate.base import Aggregate, with_samples
from shoal.aggregate.ranked import ranked


@dataclass(frozen=True)
class Median(Aggregate):
    """The middle value of each element, or the mean of the middle two, times the samples of all."""

    summary: ClassVar[str] = "the median of the parts' means, element by element"
    compares: ClassVar[bool] = True

    def combine(self, parts: Sequence[torch.Tensor], counts: Sequence[float], out: torch.Tensor) -> None:
        parts, counts = with_samples(parts, counts)
        if not parts:
            out.zero_()
            return
        low, high = (len(parts) - 1) // 2, len(parts) // 2
        for start, stop, rows in ranked(parts, counts):
            middle = rows[low] if low == high else rows[low] * 0.5 + rows[high] * 0.5
            torch.mul(middle, sum(counts), out=out[start:stop])
