"""The groups on which a collective of two levels is done, and its four parts, one for each group.

    sum_here       within the host: each worker sums what the workers with its place, on all hosts, need of this host
    sum_across     between those with the same place: each gets its own sum of every host, and adds them in host order
    gather_across  between those with the same place: everybody's part
    gather_here    within the host: what each has got from the others

A collective that begins with a gathering or a broadcast is compared first, in the groups of the sums: so whatever
ranks have called, they meet in the same groups. Each part blocks, and each has a group of its own, so that one
collective may be in its third part while the next is in its first. Where a host has no shared memory to give, all
workers count as hosts of one worker.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from torch import Tensor

from shoal.torch_private import PrefixStore, Store, c10d
from shoal.world.gloo import from_rank, gloo_group
from shoal.world.network.compared import Network
from shoal.world.shm.backend import SharedMemoryGroup
from shoal.world.shm.calls import CollectiveMismatch
from shoal.world.shm.flags import supported
from shoal.world.shm.memory import SharedMemoryUnavailable

TIMEOUT = timedelta(minutes=10)


class _GroupOptions(Protocol):
    asyncOp: bool


_AnyOptions = TypeVar("_AnyOptions", bound=_GroupOptions)


@dataclass(frozen=True)
class Seating:
    """How ranks are spread over hosts, and this rank's place."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, as many on each."""
    rank: int
    host: int
    place: int
    """Which of its host's workers this one is."""

    @staticmethod
    def of(hosts: Sequence[Sequence[int]], rank: int) -> Seating:
        """This rank's place.

        >>> seating = Seating.of([[0, 2], [1, 3]], rank=3)
        >>> seating.host, seating.place, seating.peers
        (1, 1, [2, 3])
        """
        host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        return Seating(tuple(map(tuple, hosts)), rank, host, list(hosts[host]).index(rank))

    @property
    def width(self) -> int:
        """Workers of a host."""
        return len(self.hosts[0])

    @property
    def size(self) -> int:
        return len(self.hosts) * self.width

    @property
    def peers(self) -> list[int]:
        """The ranks with this place, by host."""
        return [ranks[self.place] for ranks in self.hosts]

    def seat(self, rank: int) -> tuple[int, int]:
        """Host and place of a rank."""
        other = Seating.of(self.hosts, rank)
        return other.host, other.place


class HierarchicalGroups:
    """This worker's groups: two within its host, and two with those who have its place on other hosts."""

    def __init__(
        self,
        seating: Seating,
        here: tuple[SharedMemoryGroup, SharedMemoryGroup] | None,
        across: tuple[Network, Network],
    ) -> None:
        self._seating = seating
        self._here = here
        self._across = across

    def compare_here(self, call: int) -> None:
        """The workers of this host have come to the same call."""
        if self._here is not None:
            with self._told():
                self._here[0].compare(call).wait()

    def compare_across(self, call: int) -> None:
        """Those with this place have."""
        with self._told():
            self._across[0].compare(call)

    def sum_here(self, parts: Sequence[Tensor]) -> Tensor:
        """For every host, the sum over this host's workers of the part for this worker's peer there."""
        seating = self._seating
        rows = parts[0].new_empty(len(seating.hosts), parts[0].numel())
        if self._here is None:
            for row, peer in zip(rows, seating.peers, strict=True):
                row.copy_(parts[peer])
        else:
            wanted = [[parts[rank] for rank in ranks] for ranks in seating.hosts]
            options = _now(c10d.ReduceScatterOptions())
            with self._told():
                self._here[0].reduce_scatter(list(rows), wanted, options).wait()
        return rows.view(-1)

    def sum_across(self, rows: Tensor, out: Tensor, call: int) -> None:
        """`out` becomes the sum of the rows that all hosts have for this worker, if they have called the same."""
        with self._told():
            self._across[0].reduce_scatter(out, rows, call).wait()

    def gather_across(self, parts: Sequence[Tensor], call: int) -> None:
        """The parts of those with this place, each into its own, likewise."""
        theirs = [parts[peer] for peer in self._seating.peers]
        with self._told():
            self._across[1].all_gather(theirs, theirs[self._seating.host], call).wait()

    def gather_here(self, parts: Sequence[Tensor]) -> None:
        """The parts that the others of this host have got."""
        if self._here is not None:
            slots = [[parts[rank] for rank in ranks] for ranks in self._seating.hosts]
            mine = [parts[peer] for peer in self._seating.peers]
            with self._told():
                self._here[1].allgather(slots, mine, _now(c10d.AllgatherOptions())).wait()

    def broadcast_across(self, data: Tensor, source: int) -> None:
        """One worker of each host gets it, from host to host."""
        host, place = self._seating.seat(source)
        if place == self._seating.place:
            self._across[1].broadcast_now(data, host)

    def broadcast_here(self, data: Tensor, source: int) -> None:
        """That worker gives it to the others of its host."""
        if self._here is not None:
            with self._told():
                self._here[1].broadcast([data], _now(from_rank(self._seating.seat(source)[1]))).wait()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Where ranks of one group have called different things: those of the others wait for them in vain."""
        try:
            yield
        except CollectiveMismatch:
            for group in self._here or ():
                group.announce_refusal()
            for network in self._across:
                network.disagree()
            raise


def meet(store: Store, label: str, seating: Seating) -> HierarchicalGroups:
    """Make the groups; every rank of the seating calls it."""
    # A store's connection is busy while someone waits for a key, and the caller's thread may need it meanwhile.
    own = PrefixStore(label, store.clone())  # type: ignore[attr-defined]  # torch does not declare it
    # All or none (below): with shared memory on one host only, hosts would sum in different orders.
    here = _within(PrefixStore(f"host{seating.host}", own), seating)
    own.set(f"shared{seating.rank}", "yes" if here else "no")
    if not all(own.get(f"shared{rank}") == b"yes" for rank in range(seating.size)):
        if seating.rank == 0:
            print(
                f"shoal: a host of {seating.width} workers has no shared memory for collectives on two levels; "
                "they go over the network from every worker, which is slower.",
                file=sys.stderr,
                flush=True,
            )
        here = None
        seating = Seating.of([[rank] for rank in range(seating.size)], seating.rank)
    place = PrefixStore(f"place{seating.place}", own)
    first, second = (
        Network(
            gloo_group(PrefixStore(name, place), seating.host, len(seating.hosts), TIMEOUT),
            seating.host,
            len(seating.hosts),
        )
        for name in ("sums", "parts")
    )
    return HierarchicalGroups(seating, here, (first, second))


def _within(store: Store, seating: Seating) -> tuple[SharedMemoryGroup, SharedMemoryGroup] | None:
    if not supported():
        return None
    try:
        first, second = (
            SharedMemoryGroup(PrefixStore(name, store), seating.place, seating.width, TIMEOUT)
            for name in ("sums", "parts")
        )
    except SharedMemoryUnavailable:
        return None
    return first, second


def _now(options: _AnyOptions) -> _AnyOptions:
    """The thread that calls does the work itself: it is there for nothing else."""
    options.asyncOp = False
    return options
