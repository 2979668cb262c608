"""What stands in the brackets of `ps(...)`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.clock import make_clocks
from shoal.clock.base import Clock


@dataclass(frozen=True)
class PsOptions:
    """Options of the parameter server."""

    clock: str = ""
    """A choice of the slot `shoal.clock`, as in dssp(2, 8); bsp if nothing is said."""
    ssp: int | None = None
    """How many steps a worker may be ahead of the slowest: `ssp=4` says what `clock=ssp(4)` says."""
    servers: int = 2
    replicas: int | None = None
    """Servers that hold each shard: one less may be lost at a time. Two, where there are two."""
    then: str = ""
    after: int = 0
    """From this step on, the clock is `then`."""
    aggregate: str = "weighted"
    backup: int = 0
    """Under bsp: so many parts of a step need not be waited for."""
    tier: str = "worker"
    """"host": the workers of a host sum in shared memory and are one worker of the servers."""
    patience: float = 60.0
    """Seconds that a worker may take for a part before others get it."""
    at: str = ""
    """ADDRESS:PORT of the coordinator of servers that stand alone; empty: they are started with the run."""
    keys: str = ""
    """The file with their keys."""
    bucket_mb: float = 16.0

    def clocks(self) -> list[tuple[int, Clock]]:
        """The clocks of the run, new, each with its first step."""
        return make_clocks(self.clock, self.ssp, self.then, self.after)

    @property
    def copies(self) -> int:
        """How many servers hold each shard."""
        return min(2, self.servers) if self.replicas is None else self.replicas
