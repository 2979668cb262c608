"""One host is shared memory: one copy of the parameters and one of the optimizer state per host.

Parameters are views of one vector that all workers of a host have mapped; each worker's gradients are views of a
vector that the others can read. When a bucket is full everywhere, each worker sums its slice over all workers'
vectors where they lie, and after backward updates its slice of the parameters in place. Nothing is copied and
nothing is sent. Between hosts, the owners of the same slice all-reduce among themselves, one stream per slice.

When to use: CPU training, always, unless the optimizer must see whole parameters. A host with N workers holds
(1 + N + 2) vectors for Adam, where N copies of ddp hold 4 N.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.buckets.bucket_cost import (
    adds_slices,
    agreement_cost,
    barrier_bytes,
    buckets_of,
    bytes_of,
    held_cost,
    reductions,
    slice_state,
)
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.exchange.buckets.by_hand import ByHand, changed_by_hand
from shoal.exchange.buckets.shard_sums import SliceSums, zeros_for
from shoal.exchange.contract import JoinState, StepView
from shoal.exchange.setup import BucketOptions, Setup
from shoal.types import Promise
from shoal.world.buckets import Bucket
from shoal.world.hosts import group_ranks, ranks_by_host
from shoal.world.mesh import Mesh
from shoal.world.shm.backend import SharedMemoryGroup
from shoal.world.shm.memory import SharedMemoryUnavailable, SharedRegion
from shoal.world.traffic import ring_bytes, share_of
from shoal.world.world import DONE, Handle, World

_ONE_COPY = (
    "under shared the workers of a host have one copy, and each would change it once more; change it in place on the "
    "first worker of each host and call run.world.barrier() on all, or use ddp"
)


class Shared(BucketedExchange):
    """Gradients are summed where they lie; each worker updates its slice of the host's one model."""

    promise = Promise.EXACT
    takes_own_step = True
    one_copy = True
    in_host_memory = True
    summary = "one copy of the model per host, in shared memory"

    def __init__(self, setup: Setup, options: BucketOptions) -> None:
        super().__init__(setup, options)
        self._by_hand = ByHand(self.trained, _ONE_COPY)

    def connect(self, world: World) -> None:
        super().connect(world)
        hosts = ranks_by_host(world, "shared")
        # Two levels: a slice is summed within the host in shared memory, then between hosts by those who own it.
        self._across = world.cut([list(ranks) for ranks in zip(*hosts, strict=True)])
        """The owners of the same slice, one on each host."""
        self.owners = world.cut(hosts)

    def start(self, step: int, state: JoinState | None) -> None:
        super().start(step, state)
        self._by_hand.note()

    def begin(self, view: StepView) -> None:
        if self.owners.rank > 0:
            self._by_hand.check()
        super().begin(view)

    def take_over(self, name: str, home: torch.Tensor) -> None:
        if self.owners.size > 1:
            raise changed_by_hand(name, _ONE_COPY)
        super().take_over(name, home)

    def abort(self) -> None:
        super().abort()
        for smaller in (self.owners, self._across):
            smaller.abort()

    def allocate(self) -> list[torch.Tensor]:
        self._sums = SliceSums(self.buckets, self.owners.size, self.world.device) if self.each else None
        parameters = self._vectors("parameters")
        self._theirs = [self._vectors(f"gradients{rank}") for rank in range(self.owners.size)]
        self._gradients = self._theirs[self.owners.rank]
        return parameters

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        start, stop = self.ranges[bucket.index]
        out = vector[start:stop] if self._sums is None else self._sums.target(bucket)
        if self.owners.size == 1:
            if self._sums is not None:
                out.copy_(vector)
            return self._across.all_reduce(out)
        group = self.owners.group
        assert isinstance(group, SharedMemoryGroup)
        self.world.traffic.bytes_sent += self.owners.share_of(vector)
        # No copy into a staging area: peers read this worker's gradients where autograd has put them.
        work = group.reduce_parts([theirs[bucket.index][start:stop] for theirs in self._theirs], out)
        return work if self._across.size == 1 else _Then(work, self._across, out)

    def settle(self) -> None:
        if self._sums is not None:
            self._sums.fold()
            self.owners.barrier()  # others may still be reading the vectors that the next micro-batch writes

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        if self._sums is not None:
            return self._sums.of(bucket)
        start, stop = self.ranges[bucket.index]
        return self._gradients[bucket.index][start:stop]

    def hand_out(self) -> None:
        if self._sums is not None:
            self._sums.reset()
        self._by_hand.note()
        self.owners.barrier()

    def _adopt_parameters(self) -> None:
        super()._adopt_parameters()
        # A slow worker would write its first values over what a fast one has read from a checkpoint meanwhile.
        self.owners.barrier()

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """Each worker changes a copy of its own; then everybody takes its slice of it over."""
        # By hand each worker changes all of the model; in the one copy, changes of all workers would add up.
        views = {name: p.detach() for name, p in self.trained.items()}
        for name, view in views.items():
            self.trained[name].data = view.clone()
        yield
        self.owners.barrier()  # nobody computes with the one copy any more
        for piece, target in self.pieces:
            changed = self.trained[piece.name].detach().reshape(-1)
            target.copy_(changed[piece.offset : piece.offset + piece.numel])
        for name, view in views.items():
            self.trained[name].data = view
        self.owners.barrier()
        self._by_hand.note()

    def _vectors(self, name: str) -> list[torch.Tensor]:
        """One vector per bucket in a region of the host's workers; private memory where a worker is alone."""
        if self.owners.size == 1:
            return zeros_for(self.buckets, self.world.device)
        group, store = self.owners.group, self.world.store
        assert store is not None
        if not isinstance(group, SharedMemoryGroup):
            raise SharedMemoryUnavailable("this host's workers have no shared memory")
        me = self.world.members[self.world.rank]
        turn = store.add(f"shoal/shared/{me}", 1)  # the same on all ranks: they come here equally often
        total = sum(b.nbytes for b in self.buckets)
        label = f"shoal/shared/{self.owners.members[0]}/{turn}/{name}"
        region = SharedRegion.create(store, label, self.owners.rank, self.owners.size, total)
        vectors, offset = [], 0
        for bucket in self.buckets:
            vectors.append(region.tensor(bucket.dtype, offset, bucket.size))
            offset += bucket.nbytes
        return vectors

    @classmethod
    def cost(
        cls, options: BucketOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        """Of the host's one copy of the parameters, each worker counts an equal share."""
        del compressor
        hosts = group_ranks(mesh.data.hosts)
        place = next(ranks for ranks in hosts if mesh.data.rank in ranks)
        owners = World(place.index(mesh.data.rank), len(place), mesh.data.device, [""] * len(place))
        buckets = buckets_of(profile, owners.size, options.bucket_mb)
        slices = bytes_of(buckets) // owners.size
        sums, times = adds_slices(profile, compressed=False), reductions(profile, compressed=False)
        across = sum(ring_bytes(bucket.nbytes // owners.size, len(hosts)) for bucket in buckets)
        summed = sum(share_of(bucket.nbytes, owners.size) for bucket in buckets) + across
        barriers = (1 + sums * times) * barrier_bytes(owners.size)
        gradients = bytes_of(buckets) + sums * slices
        return (
            held_cost(profile, slices, gradients, slice_state(profile, buckets, owners))
            + Cost(wire={"data": times * summed + barriers})
            + agreement_cost(profile, mesh.data, owners, mesh)
        )


class _Then:
    """A sum within the host, then an all-reduce between the hosts, started as soon as the sum is there."""

    def __init__(self, work: torch.distributed.Work, across: World, out: torch.Tensor) -> None:
        self._second: Handle = DONE

        def start(_: object) -> None:
            self._second = across.all_reduce(out)

        # Not in `wait`: the sum between hosts would begin only after backward, and hide behind nothing.
        self._first = work.get_future().then(start)

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()
