"""The mean of the parts' mean gradients without the extremes, element by element.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
When to use: as the median, where it is known how many workers may send nonsense at most: `ratio` of all. It keeps what
the others found, so it is less noisy. With fewer than 1 / ratio parts nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.aggregate.base import Aggregate, with_samples
from shoal.aggregate.ranked import ranked
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Trimmed(Aggregate):
    """Leaves out the lowest and the highest `ratio` of the values of each element, and averages the rest."""

    summary: ClassVar[str] = "the mean of the parts' means without the extremes, element by element"
    compares: ClassVar[bool] = True
    ratio: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 0.5:
            raise ConfigError(
                f"trimmed({self.ratio}) would leave out this share of the values at both ends; give 0 or more, and "
                "less than 0.5."
            )

    def combine(self, parts: Sequence[torch.Tensor], counts: Sequence[float], out: torch.Tensor) -> None:
        parts, counts = with_samples(parts, counts)
        if not parts:
            out.zero_()
            return
        drop = self.dropped(len(parts))
        for start, stop, rows in ranked(parts, counts):
            kept = rows[drop : len(rows) - drop]
            # One after another: torch's own sum may take another order on another machine.
            for row in kept[1:]:
                kept[0].add_(row)
            torch.mul(kept[0], sum(counts) / len(kept), out=out[start:stop])

    def dropped(self, parts: int) -> int:
        """How many values are left out at each end.

        >>> Trimmed(0.1).dropped(9), Trimmed(0.1).dropped(10), Trimmed(0.29).dropped(100)
        (0, 1, 29)
        """
        # 0.29 × 100 is a little less than 29 in binary.
        return min(math.floor(self.ratio * parts + 1e-9), (parts - 1) // 2)
