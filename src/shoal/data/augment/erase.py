"""A rectangle of each image set to zero, with probability p.

When to use: objects that may be partly hidden; a model that looks at one detail only.
Zhong et al., "Random erasing data augmentation", AAAI 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_share
from shoal.data.augment.sample_draws import SampleDraws


@dataclass(frozen=True)
class Erase(Augmentation):
    """`erase(0.1)`: a tenth of the area, in half of the images."""

    summary: ClassVar[str] = "set a rectangle of images to zero"
    takes: ClassVar[str] = "images"
    area: float = 0.1
    p: float = 0.5

    def __post_init__(self) -> None:
        check_share("erase", "area", self.area)
        check_share("erase", "p", self.p)

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """A rectangle of the image's shape, wholly inside of it."""
        numbers = draws.uniform(3)
        inside = rectangle(
            rows, numbers[:, :2], torch.full((len(rows),), self.area, dtype=torch.float64, device="cpu")
        )
        inside &= (numbers[:, 2] < self.p)[:, None, None]
        return rows.masked_fill(inside[:, None] if rows.dim() == 4 else inside, 0)


def rectangle(rows: torch.Tensor, place: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
    """Which pixels of each image lie in a rectangle of this share of the image's area, at a place in [0, 1)²."""
    side = area.sqrt()  # of one rounding: the same wherever a number stands
    parts = []
    for axis, length in enumerate(rows.shape[-2:]):
        size = (side * length).round()
        start = (place[:, axis] * (length - size + 1)).floor()
        at = torch.arange(length, dtype=torch.float64, device="cpu")[None]
        parts.append((at >= start[:, None]) & (at < (start + size)[:, None]))
    return parts[0][:, :, None] & parts[1][:, None, :]
