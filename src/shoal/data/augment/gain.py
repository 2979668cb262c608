"""Numbers made louder or quieter: a signal's amplitude, an image's brightness.

When to use: recordings at any distance from the microphone, photographs in any light.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Augmentation
from shoal.data.augment.sample_draws import SampleDraws, per_row
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Gain(Augmentation):
    """`gain(6)`: by up to 6 decibels, which is half to twice the amplitude."""

    summary: ClassVar[str] = "make signals louder or quieter"
    takes: ClassVar[str] = "signals"
    decibels: float = 6.0

    def __post_init__(self) -> None:
        if self.decibels < 0:
            raise ConfigError(f"augment: gain has decibels={self.decibels:g}; it is 0 or more.")

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """One factor a sample."""
        # As Python's numbers: a vectorised power may round by its place in the vector.
        factors = [10.0 ** (d / 20.0) for d in draws.symmetric(1, self.decibels)[:, 0].tolist()]
        return rows * per_row(factors, rows)
