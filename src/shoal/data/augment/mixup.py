"""Each sample blended with another of the global batch, and so their labels.

When to use: classification that overfits; the model learns to be less sure between classes.
Zhang et al., "mixup: Beyond empirical risk minimization", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.base import Mixture
from shoal.data.augment.sample_draws import SampleDraws, per_row
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Mixup(Mixture):
    """`mixup(0.2, classes=10)`: each sample's own share is drawn from Beta(0.2, 0.2)."""

    summary: ClassVar[str] = "blend each sample with another of the batch"
    takes: ClassVar[str] = "signals"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ConfigError(f"augment: mixup has alpha={self.alpha:g}; it is above 0.")

    def mix(
        self, rows: torch.Tensor, others: torch.Tensor, draws: SampleDraws
    ) -> tuple[torch.Tensor, list[float]]:
        """A sum of the two."""
        own = [float(generator.beta(self.alpha, self.alpha)) for generator in draws.generators()]
        share = per_row(own, rows)
        return rows * share + others * (1 - share), own
