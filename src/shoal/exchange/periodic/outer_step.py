"""A synchronisation of `local` and `diloco`: the outer optimizer, and the fragments of the model that take part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import ConfigError


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: SGD with Nesterov momentum on anchors; as it stands, the plain mean."""

    lr: float = 1.0
    momentum: float = 0.0

    def step(self, anchor: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Move an anchor; the gradient is used up."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.momentum)
        anchor.sub_(gradient, alpha=self.lr)


@dataclass(frozen=True)
class Fragments:
    """Parts of the model that synchronise in turn: their number, their delay in steps, the share of own values."""

    count: int = 1
    delay: int = 0
    mix: float = 0.5

    def check(self, name: str, every: int) -> None:
        """Refuse what does not fit into a round."""
        if self.count < 1 or every % self.count or not 0 <= self.delay < every // self.count:
            raise ConfigError(
                f"{name}({every}, fragments={self.count}, delay={self.delay}): {every} steps are cut into as many "
                "equal parts as there are fragments, and a delay is shorter than such a part."
            )
        if not 0 <= self.mix < 1:
            raise ConfigError(
                f"{name}(mix={self.mix}): it is the share of its own that a worker keeps, below 1."
            )
