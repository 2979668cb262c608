"""DiLoCo: every worker trains on its own for long, and an outer optimizer with momentum moves what they have in common.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; fragments, delay and
quantised outer gradients: Douillard et al., "Streaming DiLoCo with Overlapping Communication", 2025.
When to use: workers are far from each other. `diloco(50) + int8` sends a two-hundredth of the bytes of
ddp. Needs more steps than `local` before it pays; the inner optimizer is best an Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.errors import ConfigError
from shoal.exchange.periodic.outer_step import Fragments, Outer
from shoal.exchange.periodic.periodic_exchange import Periodic, PeriodicOptions
from shoal.exchange.setup import Setup
from shoal.world.mesh import Mesh


@dataclass(frozen=True)
class DilocoOptions(PeriodicOptions):
    """Options of diloco."""

    lr: float = 0.7
    """Of the outer optimizer, as its momentum."""
    momentum: float = 0.9
    fragments: int = 1
    """Parts of the model that meet one after the other."""
    delay: int = 0
    """Steps for which a fragment's sum may travel."""
    mix: float = 0.5
    """The share of its own parameters that a worker keeps when such a sum comes in."""

    def __post_init__(self) -> None:
        self.check("diloco")
        self.cut.check("diloco", self.every)
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"diloco(lr={self.lr}, momentum={self.momentum}): a rate is above 0, and a momentum from 0 to below 1; "
                "0.7 and 0.9 are good ones."
            )

    @property
    def cut(self) -> Fragments:
        """What meets when."""
        return Fragments(self.fragments, self.delay, self.mix)


class Diloco(Periodic):
    """Steps on one's own, then one step of the outer optimizer."""

    summary = "every worker trains on its own for long; an outer optimizer with momentum joins them"
    bound = 0.15
    Options = DilocoOptions

    def __init__(self, setup: Setup, options: DilocoOptions) -> None:
        super().__init__(setup, options, Outer(options.lr, options.momentum), options.cut)

    @classmethod
    def cost(
        cls, options: DilocoOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        return cls.periodic_cost(
            options, Outer(options.lr, options.momentum), options.cut, profile, mesh, compressor
        )
