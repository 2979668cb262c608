"""Signals moved in time, and filled with zeros where nothing was.

When to use: events that may begin anywhere in the window. Images are moved by `crop` and `affine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_share
from shoal.data.augment.sample_draws import SampleDraws


@dataclass(frozen=True)
class Shift(Augmentation):
    """`shift(0.1)`: by up to a tenth of the length; `shift(0.1, wrap=true)` lets the end come in at the beginning."""

    summary: ClassVar[str] = "move signals in time"
    takes: ClassVar[str] = "signals"
    share: float = 0.1
    wrap: bool = False

    def __post_init__(self) -> None:
        check_share("shift", "share", self.share)

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """By whole steps of the last dimension."""
        length = rows.shape[-1]
        by = draws.symmetric(1, self.share * length)[:, 0].round().long()
        source = torch.arange(length, device="cpu")[None] - by[:, None]
        outside = (source < 0) | (source >= length)
        shape = (len(rows), *[1] * (rows.dim() - 2), length)
        moved = rows.gather(-1, (source % length).reshape(shape).expand(rows.shape))
        return moved if self.wrap else moved.masked_fill(outside.reshape(shape), 0)
