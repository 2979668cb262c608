"""Collectives on two levels: within a host through shared memory, between hosts one stream for each byte.

Several hosts with several workers each. In a plain collective over all of them the same bytes cross the network
several times, since nobody knows who sits next to whom. Here

    a sum         is taken within the host first, each worker a part of it; the workers with the same place on
                  other hosts add theirs, in the order of hosts; the results come back the same way
    a broadcast   crosses the network in one stream per host, along a tree of hosts, and is copied within each

so between hosts goes what one worker per host would send. Every sum is ((host 0) + (host 1)) + …, and each of these
is in rank order, in every collective and for every size: all ranks hold the same bits.

When to use: `World` does, for tensors of at least `BORDER` bytes, where the group is ours and as many workers are on
every host. It makes the groups on a thread when the first such tensor comes, so nobody's call waits for a peer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.torch_private import Store
from shoal.world.hosts import group_ranks
from shoal.world.network.compared import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Network
from shoal.world.network.stage_threads import StagedTask, Stages, Step
from shoal.world.shm.calls import word_of
from shoal.world.shm.collectives import pieces
from shoal.world.shm.flatten import numbers, numbers_and_back
from shoal.world.two_level.groups import HierarchicalGroups, Seating, meet

BORDER = 128 << 10
"""Bytes from which two levels are faster than one collective over all: below it their steps cost more time than the
bytes they save."""
CHUNK = 2 << 20
"""Bytes that go through the stages at once: with several pieces under way, memory and network work together."""


def equal_hosts(hosts: Sequence[str]) -> list[list[int]] | None:
    """The ranks of each host, where two levels are of use: several hosts with as many workers, more than one each.

    >>> equal_hosts(["a", "b", "a", "b"])
    [[0, 2], [1, 3]]
    >>> equal_hosts(["a", "a", "b"]) is None and equal_hosts(["a", "b"]) is None and equal_hosts(["a", "a"]) is None
    True
    """
    found = group_ranks(hosts)
    counts = {len(ranks) for ranks in found}
    return found if len(found) > 1 and len(counts) == 1 and min(counts) > 1 else None


class HierarchicalCollectives:
    """The collectives of one group. Each returns at once and goes on by itself."""

    def __init__(self, store: Store, label: str, hosts: list[list[int]], rank: int) -> None:
        self.seating = Seating.of(hosts, rank)
        self._store = store
        self._label = label
        # Four stages, four threads: a chunk can be in each of them at once, so shared memory and network work together.
        self._stages = Stages(4, f"shoal-levels-{rank}")
        self._lock = threading.Lock()
        self._groups: HierarchicalGroups | None = None
        self._met = False

    def all_reduce(self, tensor: Tensor) -> StagedTask:
        """Sum over all ranks, in place."""
        flat, last = numbers_and_back(tensor)
        call = word_of(ALL_REDUCE, [tensor])
        size = self.seating.size
        # A multiple of the number of ranks: every rank sums an equal part of each chunk.
        step = max(CHUNK // flat.itemsize // size, 1) * size
        steps: list[list[Step]] = []
        for chunk in pieces(flat, step):
            spare = -chunk.numel() % size
            # Only the last chunk can be short. Zeros change no sum and are not copied back.
            padded = torch.cat([chunk, chunk.new_zeros(spare)]) if spare else chunk
            parts = padded.chunk(size)
            one = [*self._sum(parts, parts[self.seating.rank], call), *self._gather(parts, call)]
            steps.append(_and_then(one, chunk, padded) if spare else one)
        return self._hand_in(steps, last)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> StagedTask:
        """Sum over all ranks; rank r keeps slice r in `out`, which may be that slice of `tensor` itself."""
        flat, last = numbers_and_back(out)
        whole = numbers(tensor)
        call = word_of(REDUCE_SCATTER, [out])
        steps: list[list[Step]] = []
        for target, parts in self._pieces(flat, whole):
            # Four steps even where two do nothing: the stages keep collectives in the order they were issued.
            steps.append([*self._sum(parts, target, call), _nothing, _nothing])
        return self._hand_in(steps, last)

    def all_gather(self, out: Tensor, part: Tensor) -> StagedTask:
        """`out` becomes the parts of all ranks, in rank order; `part` may lie in its place in `out`."""
        flat, last = numbers_and_back(out)
        call = word_of(ALL_GATHER, [part])
        steps: list[list[Step]] = []
        for mine, parts in self._pieces(numbers(part).view(torch.uint8), flat.view(torch.uint8)):
            steps.append([_place(mine, parts[self.seating.rank]), _nothing, *self._gather(parts, call)])
        steps.insert(0, self._agree(call))
        return self._hand_in(steps, last)

    def broadcast(self, tensor: Tensor, source: int) -> StagedTask:
        """`tensor` of every rank becomes that of rank `source`."""
        flat, last = numbers_and_back(tensor)
        call = word_of(BROADCAST, [tensor], root=source)
        steps = [self._agree(call)]
        for chunk in pieces(flat.view(torch.uint8), CHUNK):
            steps.append([_nothing, _nothing, *self._spread(chunk, source)])
        return self._hand_in(steps, last)

    def close(self) -> None:
        """Let the threads end."""
        self._stages.close()

    def _hand_in(self, all_steps: Sequence[Sequence[Step]], last: Sequence[Step]) -> StagedTask:
        """Put the pieces of a collective in the line, together; the last one's end is that of all."""
        with self._lock:
            if not self._met:
                self._met = True
                # Groups are made by the first task and on its thread, since making them waits for all other ranks.
                self._stages.hand_in([self._meet, _nothing, _nothing, _nothing])
            for steps in all_steps[:-1]:
                self._stages.hand_in(steps)
            return self._stages.hand_in([*all_steps[-1][:-1], _all_of([all_steps[-1][-1], *last])])

    def _meet(self) -> None:
        self._groups = meet(self._store, self._label, self.seating)

    def _there(self) -> HierarchicalGroups:
        assert self._groups is not None  # the first work in the line has seen to it
        return self._groups

    def _pieces(self, one: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """A slice, and all slices of the whole, cut alike so that all slices together make a chunk."""
        step = max(CHUNK // whole.itemsize // self.seating.size, 1)
        slices = whole.chunk(self.seating.size)
        for start in range(0, one.numel(), step):
            yield one[start : start + step], [part[start : start + step] for part in slices]

    def _sum(self, parts: Sequence[Tensor], out: Tensor, call: int) -> list[Step]:
        """The first two stages: `out` becomes the sum of everybody's part for this rank."""
        # Hands the result of the first stage to the second; filled when that runs.
        rows: list[Tensor] = []
        return [
            lambda: rows.append(self._there().sum_here(parts)),
            lambda: self._there().sum_across(rows.pop(), out, call),
        ]

    def _agree(self, call: int) -> list[Step]:
        """What goes before a collective that does not begin with a sum."""
        return [
            lambda: self._there().compare_here(call),
            lambda: self._there().compare_across(call),
            _nothing,
            _nothing,
        ]

    def _gather(self, parts: Sequence[Tensor], call: int) -> list[Step]:
        """The last two: everybody's part goes to all."""
        return [lambda: self._there().gather_across(parts, call), lambda: self._there().gather_here(parts)]

    def _spread(self, chunk: Tensor, source: int) -> list[Step]:
        return [
            lambda: self._there().broadcast_across(chunk, source),
            lambda: self._there().broadcast_here(chunk, source),
        ]


@dataclass
class Routes:
    """The levels of the groups of a job: one for each, made when first asked for."""

    turn: int = 0
    """How often this worker had opened a world before: what is agreed on then is not mistaken for what is now."""
    _made: dict[str, HierarchicalCollectives] = field(default_factory=dict)
    _networks: dict[str, Network] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(
        self, name: str, store: Store, hosts: Sequence[str], members: Sequence[int], rank: int
    ) -> HierarchicalCollectives | None:
        """The levels of the group of that name; None where there is one level only."""
        by_host = equal_hosts(hosts)
        if by_host is None:
            return None
        label = f"shoal/levels/{self.turn}/{name}/{members[0]}"
        with self._lock:
            # One for each process group, though several Worlds may stand for the same: their collectives share its
            # order.
            if label not in self._made:
                self._made[label] = HierarchicalCollectives(store, label, by_host, rank)
            return self._made[label]

    def network(self, group: ProcessGroup, store: Store | None, members: Sequence[int], rank: int) -> Network:
        """The collectives on one level of a gloo group."""
        label = f"shoal/network/{self.turn}/{group.group_name}/{members[0]}"
        with self._lock:
            if label not in self._networks:
                self._networks[label] = Network(group, rank, len(members), store, label)
            return self._networks[label]

    def close(self) -> None:
        """Let all their threads end."""
        with self._lock:
            for hierarchical in self._made.values():
                hierarchical.close()
            for network in self._networks.values():
                network.close()
            self._made.clear()
            self._networks.clear()


def _nothing() -> None:
    """A stage that a collective passes by, in its turn."""


def _place(mine: Tensor, there: Tensor) -> Step:
    return _nothing if mine.data_ptr() == there.data_ptr() else lambda: there.copy_(mine)


def _and_then(steps: list[Step], chunk: Tensor, padded: Tensor) -> list[Step]:
    """These steps, the last of which also copies the padded chunk back."""
    return [*steps[:-1], _all_of([steps[-1], lambda: chunk.copy_(padded[: chunk.numel()])])]


def _all_of(steps: Sequence[Step]) -> Step:
    def run() -> None:
        for step in steps:
            step()

    return run
