"""Images moved by whole pixels: padded by zeros on all sides, and cut at a random place to the size they had.

When to use: the standard for small images such as CIFAR's, with `crop(4) & flip`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from shoal.data.augment.base import Augmentation
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Crop(Augmentation):
    """`crop(4)`: up to four pixels each way."""

    summary: ClassVar[str] = "move images by whole pixels"
    takes: ClassVar[str] = "images"
    pad: int = 4

    def __post_init__(self) -> None:
        if self.pad < 1:
            raise ConfigError(f"augment: crop has pad={self.pad}; it is 1 or more.")

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """Rows, then columns, by index."""
        height, width = rows.shape[-2:]
        padded = F.pad(rows, [self.pad] * 4)
        place = (draws.uniform(2) * (2 * self.pad + 1)).long()
        down = (place[:, :1] + torch.arange(height, device="cpu")).reshape(
            len(rows), *[1] * (rows.dim() - 3), height, 1
        )
        padded = padded.gather(-2, down.expand(*rows.shape[:-1], padded.shape[-1]))
        across = (place[:, 1:] + torch.arange(width, device="cpu")).reshape(
            len(rows), *[1] * (rows.dim() - 2), width
        )
        return padded.gather(-1, across.expand(rows.shape))
