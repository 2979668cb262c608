"""The groups on which a collective of two levels is done, and its four parts, one for each group.

    sum_here       within the host: each worker sums what the workers with its place, on all hosts, need of this host
    sum_across     between those with the same place: each gets its own sum of every host, and adds them in host order
    gather_across  between those with the same place: everybody's part
    gather_here    within the host: what each has got from the others

Each part blocks, and each has a group of its own, so that one collective may be in its third part while the next is
in its first. Where a host has no shared memory to give, all workers count as hosts of one worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from shoal.world.flags import supported
from shoal.world.gloo import GatheredParts, ScatteredSum, from_rank, gloo_group
from shoal.world.memory import SharedMemoryUnavailable
from shoal.world.shm import SharedMemoryGroup

TIMEOUT = timedelta(minutes=10)


class _Options(Protocol):
    asyncOp: bool


_AnyOptions = TypeVar("_AnyOptions", bound=_Options)


@dataclass(frozen=True)
class Layout:
    """Who sits where."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, as many on each."""
    rank: int
    host: int
    place: int
    """Which of its host's workers this one is."""

    @staticmethod
    def of(hosts: Sequence[Sequence[int]], rank: int) -> Layout:
        """This rank's place.

        >>> layout = Layout.of([[0, 2], [1, 3]], rank=3)
        >>> layout.host, layout.place, layout.peers
        (1, 1, [2, 3])
        """
        host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        return Layout(tuple(map(tuple, hosts)), rank, host, list(hosts[host]).index(rank))

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
        other = Layout.of(self.hosts, rank)
        return other.host, other.place


class Reach:
    """This worker's groups: two within its host, and two with those who have its place on other hosts."""

    def __init__(
        self,
        layout: Layout,
        here: tuple[SharedMemoryGroup, SharedMemoryGroup] | None,
        across: tuple[ProcessGroup, ProcessGroup],
    ) -> None:
        self._layout = layout
        self._here = here
        self._across = across

    def sum_here(self, parts: Sequence[Tensor]) -> Tensor:
        """For every host, the sum over this host's workers of the part for this worker's peer there."""
        layout = self._layout
        rows = parts[0].new_empty(len(layout.hosts), parts[0].numel())
        if self._here is None:
            for row, peer in zip(rows, layout.peers, strict=True):
                row.copy_(parts[peer])
        else:
            wanted = [[parts[rank] for rank in ranks] for ranks in layout.hosts]
            self._here[0].reduce_scatter(list(rows), wanted, _now(c10d.ReduceScatterOptions())).wait()
        return rows.view(-1)

    def sum_across(self, rows: Tensor, out: Tensor) -> None:
        """`out` becomes the sum of the rows that all hosts have for this worker."""
        ScatteredSum(self._across[0], out, rows, self._layout.host, len(self._layout.hosts)).wait()

    def gather_across(self, parts: Sequence[Tensor]) -> None:
        """The parts of those with this place, each into its own."""
        theirs = [parts[peer] for peer in self._layout.peers]
        GatheredParts(self._across[1], theirs, theirs[self._layout.host], self._layout.host).wait()

    def gather_here(self, parts: Sequence[Tensor]) -> None:
        """The parts that the others of this host have got."""
        if self._here is not None:
            slots = [[parts[rank] for rank in ranks] for ranks in self._layout.hosts]
            mine = [parts[peer] for peer in self._layout.peers]
            self._here[1].allgather(slots, mine, _now(c10d.AllgatherOptions())).wait()

    def broadcast_across(self, data: Tensor, source: int) -> None:
        """One worker of each host gets it, from host to host."""
        host, place = self._layout.seat(source)
        if place == self._layout.place:
            self._across[1].broadcast([data], from_rank(host)).wait()

    def broadcast_here(self, data: Tensor, source: int) -> None:
        """That worker gives it to the others of its host."""
        if self._here is not None:
            self._here[1].broadcast([data], _now(from_rank(self._layout.seat(source)[1]))).wait()


def meet(store: Store, label: str, layout: Layout) -> Reach:
    """Make the groups; every rank of the layout calls it."""
    # A store's connection is busy while someone waits for a key, and the caller's thread may need it meanwhile.
    own = PrefixStore(label, store.clone())  # type: ignore[attr-defined]  # torch does not declare it
    here = _within(PrefixStore(f"host{layout.host}", own), layout)
    own.set(f"shared{layout.rank}", "yes" if here else "no")
    if not all(own.get(f"shared{rank}") == b"yes" for rank in range(layout.size)):
        if layout.rank == 0:
            print(
                f"shoal: a host of {layout.width} workers has no shared memory for collectives on two levels; "
                "they go over the network from every worker, which is slower.",
                file=sys.stderr,
                flush=True,
            )
        here, layout = None, Layout.of([[rank] for rank in range(layout.size)], layout.rank)
    place = PrefixStore(f"place{layout.place}", own)
    first, second = (
        gloo_group(PrefixStore(name, place), layout.host, len(layout.hosts), TIMEOUT)
        for name in ("sums", "parts")
    )
    return Reach(layout, here, (first, second))


def _within(store: Store, layout: Layout) -> tuple[SharedMemoryGroup, SharedMemoryGroup] | None:
    if not supported():
        return None
    try:
        first, second = (
            SharedMemoryGroup(PrefixStore(name, store), layout.place, layout.width, TIMEOUT)
            for name in ("sums", "parts")
        )
    except SharedMemoryUnavailable:
        return None
    return first, second


def _now(options: _AnyOptions) -> _AnyOptions:
    """The thread that calls does the work itself: it is there for nothing else."""
    options.asyncOp = False
    return options
