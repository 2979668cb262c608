"""Images mirrored, each with probability p.

When to use: whatever looks as likely the other way round. Not text, not digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation, check_share
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError

_AXES = {"width": -1, "height": -2}


@dataclass(frozen=True)
class Flip(Augmentation):
    """`flip`, or `flip(0.5, axis=height)` for upside down."""

    summary: ClassVar[str] = "mirror images"
    takes: ClassVar[str] = "images"
    p: float = 0.5
    axis: str = "width"

    def __post_init__(self) -> None:
        check_share("flip", "p", self.p)
        if self.axis not in _AXES:
            raise ConfigError(f"augment: flip has axis={self.axis}; it is width or height.")

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """The mirrored ones are written over a copy."""
        which = draws.chosen(self.p)
        changed = rows.clone()
        changed[which] = rows[which].flip(_AXES[self.axis])
        return changed
