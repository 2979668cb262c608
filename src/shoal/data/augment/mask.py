"""A stretch of each signal silenced; or single tokens replaced by a mask token.

When to use: signals, to make a model use all of the time (SpecAugment, Park et al., Interspeech 2019); token ids, for
masked language models (Devlin et al., "BERT", 2019), with the whole text as labels in another part of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_rows, check_share, numbers_in, one_of
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Mask(Augmentation):
    """Signals: `mask(0.2)` silences a stretch of up to a fifth. Tokens: `mask(0.15, token=103, keep=101/102/0)`
    replaces 15 % of them, none of those to keep."""

    summary: ClassVar[str] = "silence a stretch of signals, or replace token ids"
    takes: ClassVar[str] = "signals"
    share: float = 0.15
    token: int | None = None
    keep: str = ""

    def __post_init__(self) -> None:
        check_share("mask", "share", self.share)
        numbers_in("mask", self.keep)

    def apply(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """By what rows hold."""
        if rows.is_floating_point() and self.token is None:
            return super().apply(rows, draws)
        if self.token is None:
            raise ConfigError(
                "augment: mask needs the token that stands for a masked one: mask(0.15, token=103)."
            )
        check_rows(_OF_TOKENS, rows)
        hidden = (draws.uniform(rows.shape[1]) < self.share) & ~one_of(rows, numbers_in("mask", self.keep))
        return rows.masked_fill(hidden, self.token)

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """A stretch of the last dimension, of any length up to the share."""
        numbers = draws.uniform(2)
        length = rows.shape[-1]
        size = (numbers[:, 0] * (self.share * length + 1)).floor().clamp(max=length)
        start = (numbers[:, 1] * (length - size + 1)).floor()
        at = torch.arange(length, dtype=torch.float64, device="cpu")[None]
        inside = (at >= start[:, None]) & (at < (start + size)[:, None])
        return rows.masked_fill(inside.reshape(len(rows), *[1] * (rows.dim() - 2), length), 0)


class _Tokens(Mask):
    """Mask, as messages about token ids call it."""

    takes: ClassVar[str] = "tokens"


_OF_TOKENS = _Tokens()
_Tokens.__name__ = "mask"
