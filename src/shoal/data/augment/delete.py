"""Tokens left out; those behind them move up, and the end is filled with padding.

When to use: as `swap`, texts to classify as a whole. Not where each token has a label of its own, which would not move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_share, numbers_in, one_of
from shoal.data.augment.sample_draws import SampleDraws


@dataclass(frozen=True)
class Delete(Augmentation):
    """`delete(0.1, pad=0, keep=101/102)`: a tenth of all tokens but these and padding."""

    summary: ClassVar[str] = "leave out token ids"
    takes: ClassVar[str] = "tokens"
    share: float = 0.1
    pad: int = 0
    keep: str = ""

    def __post_init__(self) -> None:
        check_share("delete", "share", self.share)
        numbers_in("delete", self.keep)

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """Deleted places are sorted behind the others, which keep their order."""
        kept = one_of(rows, (self.pad, *numbers_in("delete", self.keep)))
        gone = (draws.uniform(rows.shape[1]) < self.share) & ~kept
        order = gone.long().argsort(dim=1, stable=True)
        return rows.gather(1, order).masked_fill(gone.gather(1, order), self.pad)
