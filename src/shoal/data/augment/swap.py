"""Neighbouring tokens exchanged.

When to use: short texts to classify, of which few are labelled (Wei and Zou, "EDA", EMNLP 2019). Not where each token
has a label of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_share, numbers_in, one_of
from shoal.data.augment.sample_draws import SampleDraws


@dataclass(frozen=True)
class Swap(Augmentation):
    """`swap(0.1)`: a tenth of all neighbours; `swap(0.1, keep=101/102/0)` leaves these tokens in their places."""

    summary: ClassVar[str] = "exchange neighbouring token ids"
    takes: ClassVar[str] = "tokens"
    share: float = 0.1
    keep: str = ""

    def __post_init__(self) -> None:
        check_share("swap", "share", self.share)
        numbers_in("swap", self.keep)

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """Pairs begin at even places in half of the samples and at odd ones in the others: no token is in two."""
        length = rows.shape[1]
        numbers = draws.uniform(length + 1)
        kept = one_of(rows, numbers_in("swap", self.keep))
        first = torch.arange(length, device="cpu")[None] % 2 == (numbers[:, :1] < 0.5).long()
        first = first & (numbers[:, 1:] < self.share) & ~kept
        first[:, -1:] = False
        first[:, :-1] &= ~kept[:, 1:]
        source = torch.arange(length, device="cpu")[None] + first.long()
        source[:, 1:] -= first[:, :-1].long()
        return rows.gather(1, source)
