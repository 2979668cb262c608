"""Local SGD: every worker trains on its own, and now and then all go on from the mean of their parameters.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large Mini-Batches, Use
Local SGD", ICLR 2020.
When to use: the network is what is slow. `local(16)` sends a sixteenth of what ddp does. With `local(1)` and plain SGD
it is ddp.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.exchange.outer import Fragments, Outer
from shoal.exchange.periodic import Periodic
from shoal.exchange.rounds import Rhythm
from shoal.exchange.setup import Setup
from shoal.types import Memory


@dataclass(frozen=True)
class LocalOptions:
    """Options of local."""

    every: int
    """Steps between two meetings."""
    quorum: float = 1.0
    """The share of workers that waits for the others no longer than `grace` seconds."""
    grace: float = 0.0
    bucket_mb: float = 16.0

    def __post_init__(self) -> None:
        self.rhythm.check("local")

    @property
    def rhythm(self) -> Rhythm:
        """When workers meet."""
        return Rhythm(self.every, self.quorum, self.grace)


class Local(Periodic):
    """Steps on one's own, then the mean of all parameters."""

    summary = "every worker trains on its own; now and then parameters are averaged"
    bound = 0.1
    Options = LocalOptions

    def __init__(self, setup: Setup, options: LocalOptions) -> None:
        super().__init__(setup, options.rhythm, Outer(), Fragments(), options.bucket_mb)

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        del workers
        each = parameters * itemsize
        return Memory(each, each, each * state_per_parameter, 2 * each)
