"""Local SGD: every worker trains on its own, and now and then all go on from the mean of their parameters.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large Mini-Batches, Use
Local SGD", ICLR 2020.
When to use: the network is what is slow. `local(16)` sends a sixteenth of what ddp does. With `local(1)` and plain SGD
it is ddp.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.periodic.outer_step import Fragments, Outer
from shoal.exchange.periodic.periodic_exchange import Periodic, PeriodicOptions
from shoal.exchange.setup import Setup
from shoal.world.mesh import Mesh


@dataclass(frozen=True)
class LocalOptions(PeriodicOptions):
    """Options of local."""

    def __post_init__(self) -> None:
        self.check("local")


class Local(Periodic):
    """Steps on one's own, then the mean of all parameters."""

    summary = "every worker trains on its own; now and then parameters are averaged"
    bound = 0.1
    Options = LocalOptions

    def __init__(self, setup: Setup, options: LocalOptions) -> None:
        super().__init__(setup, options, Outer(), Fragments())

    @classmethod
    def cost(
        cls, options: LocalOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        return cls.periodic_cost(options, Outer(), Fragments(), profile, mesh, compressor)
