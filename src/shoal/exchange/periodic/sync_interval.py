"""When workers that train independently synchronise: after some number of steps, or earlier by a quorum.

With a quorum, those who are first wait a grace window for the others and then call them. Who is called comes after
the step that it is at, with what it has done so far; the rest of its round it leaves out. So a slow worker holds the
others up for one step of its own at most, not for its whole round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import monotonic, sleep

from shoal.errors import ConfigError
from shoal.world.world import World

POLL_SECONDS = 0.002


@dataclass(frozen=True)
class SyncInterval:
    """When workers meet, as a user says it: what has a name only comes behind an exchange's own options."""

    every: int
    """Steps between two meetings of each parameter."""
    quorum: float = field(default=1.0, kw_only=True)
    """The share of workers that waits for the others no longer than `grace` seconds."""
    grace: float = field(default=0.0, kw_only=True)

    def check(self, name: str) -> None:
        """Refuse what nobody could keep."""
        if self.every < 1:
            raise ConfigError(
                f"{name}({self.every}): workers meet after 1 step at least; 16 is a good number."
            )
        if not 0 < self.quorum <= 1 or self.grace < 0:
            raise ConfigError(
                f"{name}(quorum={self.quorum}, grace={self.grace}): a quorum is a share of the workers, above 0 and at "
                "most 1, and a grace window a time in seconds."
            )


class Rounds:
    """Counts the workers that have arrived at the synchronisation of a round. Every worker has one."""

    def __init__(self, world: World, interval: SyncInterval) -> None:
        self._world = world
        self._interval = interval
        # Less a billionth: 0.28 * 25 is a little above 7 in floating point.
        self._needed = math.ceil(interval.quorum * world.size - 1e-9)
        self._waits_for_all = self._needed >= world.size or world.store is None
        if not self._waits_for_all:
            assert world.store is not None
            me = world.members[world.rank]
            turn = world.store.add(
                f"shoal/rounds/{me}", 1
            )  # the same on all ranks: they come here equally often
            self._label = f"shoal/rounds/{world.members[0]}/{turn}"

    def called(self, number: int) -> bool:
        """Whether the others are waiting for this worker at the end of round `number`."""
        store = self._world.store
        return (
            not self._waits_for_all and store is not None and store.check([f"{self._label}/called/{number}"])
        )

    def arrive(self, number: int) -> None:
        """This worker has done its round; if it makes the quorum full, it waits for a while and calls the others."""
        store = self._world.store
        if self._waits_for_all or store is None:
            return
        key = f"{self._label}/arrived/{number}"
        # Exactly one worker finds the number that makes the quorum full, and calls the others.
        if store.add(key, 1) != self._needed:
            return
        until = monotonic() + self._interval.grace
        while monotonic() < until and store.add(key, 0) < self._world.size:
            sleep(POLL_SECONDS)
        store.set(f"{self._label}/called/{number}", "1")
