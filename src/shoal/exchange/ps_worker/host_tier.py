"""Two levels: the workers of a host sum their gradients in shared memory, and are one worker of the servers.

The first worker of a host, its leader, talks to the servers for all: one stream of gradients leaves the host and one of
values comes back, however many workers it has. They hold one copy of the parameters between them. The host is what can
be lost: with one of its workers the others end too, and its part of the work goes to other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from shoal.errors import ConfigError
from shoal.exchange.contract import Tally
from shoal.world.buckets import Bucket, slice_of
from shoal.world.hosts import ranks_by_host
from shoal.world.shm.backend import SharedMemoryGroup
from shoal.world.shm.memory import SharedMemoryUnavailable, SharedRegion
from shoal.world.world import Handle, World

T = TypeVar("T")


class Tier:
    """The workers that are one client of the servers: those of a host, or without `whole_host` each worker alone."""

    def __init__(self, world: World, whole_host: bool) -> None:
        self.units = world.size
        self.unit = world.rank
        """How many workers the servers see, and which of them this one belongs to."""
        self.local = World.alone(world.device)
        self._world = world
        if whole_host:
            hosts = ranks_by_host(world, "ps(tier=host)")
            # Parts of a unit are consecutive, as in one process with `accumulate`: see `part`.
            if any(ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in hosts):
                raise ConfigError(
                    "ps(tier=host) needs the ranks of a host to follow each other; start with `shoal run`."
                )
            self.units = len(hosts)
            self.unit = next(number for number, ranks in enumerate(hosts) if world.rank in ranks)
            self.local = world.cut(hosts)
        if self.local.size > 1 and not isinstance(self.local.group, SharedMemoryGroup):
            raise ConfigError("ps(tier=host) sums in shared memory, and there is none here; leave tier out.")

    @property
    def leads(self) -> bool:
        """Whether this worker talks to the servers."""
        return self.local.rank == 0

    def lead(self, action: Callable[[], T]) -> T:
        """Have the leader do something; its result, a plain value, goes to all workers of the host. Collective."""
        if self.local.size == 1:
            return action()
        # Errors of the leader are raised there and end the host's workers with it: they lose their collective.
        value: T = self.local.gather_values(action() if self.leads else None)[0]
        return value

    def part(self, unit_part: int) -> int:
        """Which of the step's parts this worker computes of the unit's."""
        return unit_part * self.local.size + self.local.rank if unit_part >= 0 else -1

    def add(self, mine: Tally) -> Tally:
        """The loss of the whole unit."""
        if self.local.size == 1:
            return mine
        total, count = self.local.gather_numbers([mine.total, mine.count]).sum(0).tolist()
        return Tally(total, count)

    def union(self, used: Sequence[bool]) -> list[bool]:
        """The parameters that any worker of the unit has used."""
        if self.local.size == 1:
            return list(used)
        return [flag > 0 for flag in self.local.gather_numbers([float(f) for f in used]).sum(0).tolist()]

    def vectors(self, buckets: Sequence[Bucket], name: str) -> list[torch.Tensor]:
        """One vector per bucket that all of the unit have mapped."""
        store = self._world.store
        assert store is not None
        me = self._world.members[self._world.rank]
        turn = store.add(f"shoal/tier/{me}", 1)  # the same on all ranks: they come here equally often
        label = f"shoal/tier/{self.local.members[0]}/{turn}/{name}"
        try:
            region = SharedRegion.create(
                store, label, self.local.rank, self.local.size, sum(bucket.nbytes for bucket in buckets)
            )
        except SharedMemoryUnavailable as reason:
            raise ConfigError(f"ps(tier=host): no shared memory ({reason}); leave tier out.") from None
        found, offset = [], 0
        for bucket in buckets:
            found.append(region.tensor(bucket.dtype, offset, bucket.size))
            offset += bucket.nbytes
        return found

    def reduce(self, bucket: Bucket, theirs: Sequence[torch.Tensor]) -> Handle:
        """Sum what all of the unit have in a bucket into the leader's vector, each worker a slice of it."""
        group = self.local.group
        assert isinstance(group, SharedMemoryGroup)
        start, stop = slice_of(bucket, self.local.size, self.local.rank)
        return group.reduce_parts([vector[start:stop] for vector in theirs], theirs[0][start:stop])
