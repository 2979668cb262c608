"""The mechanism under local and diloco: workers train independently, and average their progress now and then.

Each worker runs the user's optimizer on its own gradients. At a meeting, the way that a worker has gone since the last
one, anchor − parameters, is its outer gradient. The mean of them, weighted by what each worker's losses counted, goes
into an outer optimizer, which moves the anchor; everybody goes on from there.

Parameters may be cut into fragments that meet one after the other, spread over the round, and a fragment's sum may
travel while the next steps are computed: it is taken in `delay` steps later, mixed with what was learned meanwhile.

Between meetings nobody waits for anybody, so the loss in a report is that of the worker's own samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.buckets.bucket_cost import (
    buckets_of,
    bytes_of,
    gathered_number,
    held_cost,
    model_number,
    shapes_of,
    whole_state,
)
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.exchange.buckets.norms import root_of_sum, squares_of
from shoal.exchange.buckets.shard_sums import zeros_for
from shoal.exchange.contract import (
    ExtraState,
    JoinState,
    LocalShard,
    Numbers,
    Sequential,
    StepView,
    Tally,
    check_members,
)
from shoal.exchange.frozen import compare_frozen, frozen_sum
from shoal.exchange.local_tensor import local
from shoal.exchange.periodic.outer_step import Fragments, Outer
from shoal.exchange.periodic.sync_interval import Rounds, SyncInterval
from shoal.exchange.reduce.make_reducer import make_reducer
from shoal.exchange.reduce.reduce_cost import reduction_cost
from shoal.exchange.reduce.residuals import lay_out_keeping, own_optimizer_state, put_back, unsent
from shoal.exchange.setup import BucketOptions, Setup
from shoal.types import Promise
from shoal.world.buckets import Bucket, pieces_of
from shoal.world.mesh import Mesh
from shoal.world.world import DONE, Handle, World


@dataclass(frozen=True)
class PeriodicOptions(SyncInterval):
    """Options of local and diloco."""

    bucket_mb: float = field(default=16.0, kw_only=True)


@dataclass
class Travelling:
    """A fragment under way: outer gradients by bucket, and the step before which they are taken in."""

    index: int
    due: int
    seen: float
    """What this worker's losses counted since the fragment met last."""
    sums: list[tuple[Bucket, torch.Tensor, Handle]] = field(default_factory=list)
    resend: dict[int, torch.Tensor] | None = None
    """By bucket, what was sent, to send it again if a worker is lost; None where a meeting waits for its sums."""


class Periodic(BucketedExchange):
    """Steps on one's own, then a meeting."""

    promise = Promise.CONVERGES
    whole_updates = True
    compresses = True
    updates_alone = True
    loss_is_local = True
    saves = True

    @abstractmethod  # what happens at a meeting is for heirs to say
    def __init__(self, setup: Setup, options: PeriodicOptions, outer: Outer, fragments: Fragments) -> None:
        self._outer = outer
        self._fragments = fragments
        self._when: SyncInterval = options
        self._outer_compressor = setup.compressor
        self._interval = options.every // fragments.count
        self._sequential = Sequential()
        self.meeting_interval = self._interval
        self.sync_interval = self._interval if options.quorum < 1 else 1
        self._anchors: list[torch.Tensor] = []
        self._momenta: list[torch.Tensor] = []
        self._shown: list[torch.Tensor] | None = None
        self._seen = [0.0] * fragments.count
        """By fragment, what this worker's losses have counted since it met last."""
        self._count = 0.0
        """The count of the present step's loss."""
        self._travelling: list[Travelling] = []
        self._done = 0
        """Steps that are over for this worker; more than it has made, where others have called it to a meeting."""
        self._stop: int | None = None
        self._alike = True
        """Whether all workers have the same parameters: no step since a meeting of the whole model."""
        trained = sum(local(p).numel() * p.itemsize for p in setup.model.parameters() if p.requires_grad)
        bucket_mb = fitting_bucket(options, fragments, trained)
        # Gradients stay here: only what a meeting sums is compressed.
        super().__init__(replace(setup, compressor=None, deterministic=False), BucketOptions(bucket_mb))

    def connect(self, world: World) -> None:
        # For the steps in between, this worker is alone; only meetings see the peers.
        super().connect(World.alone(world.device))
        self.owners = world
        self._peers = world
        self._rounds = Rounds(world, self._when)
        self._sums = make_reducer(world, self._outer_compressor, self._model_world)

    @classmethod
    def periodic_cost(
        cls,
        options: PeriodicOptions,
        outer: Outer,
        fragments: Fragments,
        profile: ModelProfile,
        mesh: Mesh,
        compressor: Compressor | None,
    ) -> Cost:
        """`cost` of an exchange with this outer optimizer and these fragments."""
        bucket_mb = fitting_bucket(options, fragments, sum(p.nbytes for p in profile.trained))
        buckets = buckets_of(profile, mesh.data.size, bucket_mb)
        nbytes = bytes_of(buckets)
        met = reduction_cost(mesh.data, compressor, buckets, shapes_of(profile), False)
        sent = met.wire.get("data", 0) + fragments.count * gathered_number(mesh.data.size, 2)
        parts = [bytes_of(fragment_of(index, fragments.count, buckets)) for index in range(fragments.count)]
        kept = {"outer": nbytes * (2 if outer.momentum else 1), "working": max(parts)}
        agreement = model_number(mesh).repeated(2 if profile.norm else 1)
        return (
            held_cost(profile, nbytes, nbytes, whole_state(profile))
            + Cost(met.resident)
            + Cost(kept, {"data": sent / options.every})
            + agreement
        )

    # Layout.

    def _lay_out(self) -> None:
        anchors, momenta = self._by_name(self._anchors), self._by_name(self._momenta)
        super()._lay_out()
        self._anchors = [vector.clone() for vector in self.vectors]
        self._momenta = [torch.zeros_like(v) for v in self.vectors] if self._outer.momentum else []
        for vectors, before in ((self._anchors, anchors), (self._momenta, momenta)):
            for name, view in self._by_name(vectors).items() if before else ():
                view.copy_(before[name])
        shapes = {name: local(p).shape for name, p in self.trained.items()}
        lay_out_keeping(self._sums, self.buckets, shapes, scattered=False)

    def agree(self, seen: list[str]) -> list[str]:
        found: list[str] = self._peers.gather_values(seen)[0]
        return found

    def allocate(self) -> list[torch.Tensor]:
        self._gradients = zeros_for(self.buckets, self.world.device)
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        del bucket, vector
        return DONE

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    # Steps.

    @property
    def work(self) -> Periodic:
        return self

    def start(self, step: int, state: JoinState | None) -> None:
        super().start(step, state)
        self._done = step

    def next(self, after: int, stop: int | None) -> StepView | None:
        self._stop = stop
        return self._sequential.next(after if stop is None else max(after, self._done), stop)

    def next_part(self, view: StepView, tally: Tally, expected_count: float) -> StepView:
        return self._sequential.next_part(view, tally, expected_count)

    def committed(self, view: StepView, state: JoinState) -> int:
        del view, state
        return self._done

    def begin(self, view: StepView) -> None:
        super().begin(view)
        self._done = view.step

    def finish(self, tally: Tally) -> Tally:
        # Of a pipeline, only the last stage has counted; all stages of a model must weigh alike.
        self._count = float(self._model_world.gather_numbers([tally.count]).max())
        return super().finish(tally)

    def grad_norm(self) -> float:
        squares = squares_of([self._gradients[b.index] for b in self.buckets])
        whole = sum(b.share * each for b, each in zip(self.buckets, squares, strict=True))
        return root_of_sum(whole, self.world, self._model_world)

    def hand_out(self) -> None:
        """After a step: meet, if it is time or the others call."""
        self._alike = False
        self._seen = [seen + self._count for seen in self._seen]
        self._count = 0.0  # a meeting that is cut short is held again, and counts a step once
        done = self._done + 1
        # The meeting that this step belongs to, counted from 1.
        number = -(-done // self._interval)
        if done % self._interval == 0:
            self._rounds.arrive(number)
        # With quorum < 1, enough others are waiting: this worker goes to the meeting with fewer steps, and counts the
        # rest as done.
        elif self._rounds.called(number):
            done = number * self._interval
        # Before a new fragment sets out: sums are waited for in the order in which they were started.
        for fragment in [f for f in self._travelling if f.due <= done]:
            self._take_in(fragment, late=True)
        if done == self._stop:
            self.final_sync()
        elif done % self._interval == 0:
            fragment = self._set_out(number % self._fragments.count, done + self._fragments.delay)
            if self._fragments.delay == 0:
                self._take_in(fragment, late=False)
        self._done = done  # last of all: a meeting that is cut short is held again

    def abort(self) -> None:
        super().abort()
        self._sums.close()
        for fragment in self._travelling:
            if fragment.resend is None:  # its meeting is held again
                self._seen[fragment.index] += fragment.seen
        self._travelling = [fragment for fragment in self._travelling if fragment.resend is not None]

    def reopen(self, world: World, model_world: World) -> None:
        check_members(self._members, world)
        residuals = {extra.held.name: extra.held.tensor for extra in unsent(self._sums, saving=True)}
        self._members = world
        self._model_world = model_world
        self.connect(world)
        self._lay_out()
        put_back(self._sums, residuals)
        for fragment in self._travelling:
            assert fragment.resend is not None
            again = [(self.buckets[index], kept.clone()) for index, kept in fragment.resend.items()]
            fragment.sums = [(b, gradient, self._sums.all_reduce(b, gradient)) for b, gradient in again]
        if self._applied:
            self.publish()

    def final_sync(self) -> None:
        for fragment in list(self._travelling):
            self._take_in(fragment, late=True)
        for index in range(self._fragments.count if not self._alike else 0):
            self._take_in(self._set_out(index, self._done), late=False)
        self._alike = True

    def _set_out(self, index: int, due: int) -> Travelling:
        """The outer gradients of a fragment begin to travel."""
        told = self._peers.gather_numbers([self._seen[index], frozen_sum(self.trained)])
        compare_frozen(self._peers, told[:, 1].tolist(), self.trained)
        counts = told[:, 0].tolist()
        # Weighted by samples, as one process would; alike where no loss of any worker has counted.
        weight = counts[self._peers.rank] / sum(counts) if sum(counts) else 1 / self._peers.size
        # Streaming DiLoCo (Douillard et al., 2025): one fragment at a time travels, `delay` steps long, while training
        # goes on.
        fragment = Travelling(index, due, self._seen[index])
        if self._fragments.delay:
            fragment.resend = {}
        self._travelling.append(fragment)
        self._seen[index] = 0.0
        for bucket in self._buckets_of(index):
            # DiLoCo's outer gradient: where the fragment was after its last meeting, minus where it is.
            gradient = torch.sub(self._anchors[bucket.index], self.vectors[bucket.index]).mul_(weight)
            if fragment.resend is not None:
                # The sum is made in place: if a peer is lost under way, nothing else holds what was sent.
                fragment.resend[bucket.index] = gradient.clone()
            fragment.sums.append((bucket, gradient, self._sums.all_reduce(bucket, gradient)))
        return fragment

    def _take_in(self, fragment: Travelling, late: bool) -> None:
        """The sums of a fragment are there, or waited for: move its anchors, and go on from them.

        `late`: steps have been made since it set out, whose worth must not be lost.
        """
        for _, _, handle in fragment.sums:  # all of them first: a fragment moves as a whole or not at all
            handle.wait()
        self._travelling.remove(fragment)
        for bucket, gradient, _ in fragment.sums:
            anchor, mine = self._anchors[bucket.index], self.vectors[bucket.index]
            # On every worker alike, from the same sum: anchors stay equal without being sent.
            self._outer.step(anchor, gradient, self._momenta[bucket.index] if self._momenta else None)
            if late:
                # The steps since the fragment set out are in this worker's parameters alone: copying would undo them.
                mine.lerp_(anchor, 1 - self._fragments.mix)
            else:
                mine.copy_(anchor)
        self._alike = self._fragments.count == 1 and not late

    def _buckets_of(self, index: int) -> list[Bucket]:
        return fragment_of(index, self._fragments.count, self.buckets)

    # State.

    def prepare_save(self) -> None:
        for fragment in list(self._travelling):
            self._take_in(fragment, late=True)
        self._shown = None if self._alike else self._mean()

    def parameter_shards(self) -> list[LocalShard]:
        return super().parameter_shards() if self._shown is None else self._with_frozen(self._shown)

    def parameters(self) -> dict[str, torch.Tensor]:
        if self._alike:
            return super().parameters()
        shapes = {name: local(p).shape for name, p in self.module.named_parameters()}
        return {h.name: h.tensor.reshape(shapes[h.name]).clone() for h in self._with_frozen(self._mean())}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self._alike:
            yield
            return
        # Evaluation is of the mean model; afterwards each worker goes on from its own.
        own = [vector.clone() for vector in self.vectors]
        for vector, mean in zip(self.vectors, self._mean(), strict=True):
            vector.copy_(mean)
        try:
            yield
        finally:
            for vector, mine in zip(self.vectors, own, strict=True):
                vector.copy_(mine)

    def extras(self, saving: bool) -> list[ExtraState]:
        found = [ExtraState("outer", h, alike=True) for h in self._views(self._momenta)]
        if not (saving and self._alike):
            found += [ExtraState("anchor", held, alike=True) for held in self._views(self._anchors)]
            found += [ExtraState("local", held) for held in self._views(self.vectors)]
        return found + own_optimizer_state(self) + unsent(self._sums, saving)

    def warm(self) -> dict[str, torch.Tensor]:
        return self._sums.warm()

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        self._sums.warm_start(found)

    def numbers(self) -> Numbers:
        return {"seen": list(self._seen)}

    def load_numbers(self, numbers: Mapping[str, Sequence[float]]) -> None:
        if len(numbers.get("seen", ())) == len(self._seen):
            self._seen = [float(count) for count in numbers["seen"]]

    def loaded(self, kinds: set[str]) -> None:
        if "anchor" not in kinds:
            for anchor, vector in zip(self._anchors, self.vectors, strict=True):
                anchor.copy_(vector)
        self._alike = "local" not in kinds

    def close(self) -> None:
        super().close()
        self._sums.close()

    def _mean(self) -> list[torch.Tensor]:
        """The parameters of all workers, weighted alike. Collective."""
        found = [vector / self._peers.size for vector in self.vectors]
        for handle in [self._peers.all_reduce(vector) for vector in found]:
            handle.wait()
        return found

    def _views(self, vectors: list[torch.Tensor]) -> list[LocalShard]:
        return [
            LocalShard(piece.name, piece.offset, vector[piece.start : piece.start + piece.numel])
            for bucket, vector in zip(self.buckets if vectors else (), vectors, strict=True)
            for piece in pieces_of(bucket, 0, bucket.size)
        ]

    def _by_name(self, vectors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {held.name: held.tensor for held in self._views(vectors)}

    def _with_frozen(self, vectors: list[torch.Tensor]) -> list[LocalShard]:
        found = {held.name: held for held in self._views(vectors)}
        return [found.get(held.name, held) for held in super().parameter_shards()]


def fitting_bucket(options: PeriodicOptions, fragments: Fragments, trained: int) -> float:
    """Megabytes of a bucket: as asked for, but so few that every fragment has one. `trained`: bytes of what learns."""
    return min(options.bucket_mb, max(trained / fragments.count / 2**20, 2**-10))


def fragment_of(index: int, count: int, buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets of one of `count` fragments."""
    return [bucket for bucket in buckets if bucket.index * count // len(buckets) == index]
