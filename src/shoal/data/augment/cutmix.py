"""A rectangle of each image taken from another of the global batch, and as much of its label.

When to use: as `mixup`, of images; what is seen stays natural.
Yun et al., "CutMix: Regularization strategy to train strong classifiers with localizable features", ICCV 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Mixture
from shoal.data.augment.erase import rectangle
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Cutmix(Mixture):
    """`cutmix(1.0, classes=10)`: the area is drawn from Beta(1, 1)."""

    summary: ClassVar[str] = "put a rectangle of another image into each"
    takes: ClassVar[str] = "images"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ConfigError(f"augment: cutmix has alpha={self.alpha:g}; it is above 0.")

    def mix(
        self, rows: torch.Tensor, others: torch.Tensor, draws: SampleDraws
    ) -> tuple[torch.Tensor, list[float]]:
        """What counts for the label is the area in whole pixels."""
        area = [float(generator.beta(self.alpha, self.alpha)) for generator in draws.generators()]
        inside = rectangle(rows, draws.uniform(2), torch.tensor(area, dtype=torch.float64, device="cpu"))
        pixels = rows.shape[-1] * rows.shape[-2]
        own = [1.0 - count / pixels for count in inside.sum((1, 2)).tolist()]
        return torch.where(inside[:, None] if rows.dim() == 4 else inside, others, rows), own
