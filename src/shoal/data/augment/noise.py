"""Normal noise added to numbers: images, signals, features.

When to use: recordings and sensors, and numbers whose last digits mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shoal.data.augment.base import Augmentation
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Noise(Augmentation):
    """`noise(0.01)`: of this standard deviation."""

    summary: ClassVar[str] = "add normal noise"
    takes: ClassVar[str] = "signals"
    std: float

    def __post_init__(self) -> None:
        if self.std < 0:
            raise ConfigError(f"augment: noise has std={self.std:g}; it is 0 or more.")

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """Drawn sample by sample, in the order of its numbers."""
        kind = np.float64 if rows.dtype is torch.float64 else np.float32
        noise = np.empty(tuple(rows.shape), dtype=kind)
        for row, generator in zip(noise, draws.generators(), strict=True):
            row[...] = generator.standard_normal(row.shape, dtype=kind)
        return rows + (torch.from_numpy(noise) * self.std).to(rows.dtype)
