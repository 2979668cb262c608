"""The mechanism under local and diloco: workers train apart and put together what they have learned now and then.

Each worker runs the user's optimizer on its own gradients. At a meeting, the way that a worker has gone since the last
one, anchor − parameters, is its outer gradient. The mean of them, weighted by what each worker's losses counted, goes
into an outer optimizer, which moves the anchor; everybody goes on from there.

Parameters may be cut into fragments that meet one after the other, spread over the round, and a fragment's sum may
travel while the next steps are computed: it is taken in `delay` steps later, mixed with what was learned meanwhile.

Between meetings nobody waits for anybody, so the loss in a report is that of the worker's own samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from shoal.exchange.base import Held, Owned, Tally
from shoal.exchange.flat import FlatExchange
from shoal.exchange.here import local
from shoal.exchange.norms import root_of_sum, sum_of_squares
from shoal.exchange.outer import Fragments, Outer
from shoal.exchange.owned import lay_out_keeping, own_optimizer_state, unsent
from shoal.exchange.reducers import make_reducer
from shoal.exchange.rounds import Rhythm, Rounds
from shoal.exchange.setup import BucketOptions, Setup
from shoal.exchange.slices import zeros_for
from shoal.types import Memory, Promise
from shoal.world.buckets import Bucket, pieces_of
from shoal.world.world import DONE, Handle, World


@dataclass(frozen=True)
class PeriodicOptions(Rhythm):
    """Options of local and diloco."""

    bucket_mb: float = field(default=16.0, kw_only=True)


@dataclass
class Travelling:
    """A fragment under way: outer gradients by bucket, and the step before which they are taken in."""

    due: int
    sums: list[tuple[Bucket, torch.Tensor, Handle]]


class Periodic(FlatExchange):
    """Steps on one's own, then a meeting."""

    promise = Promise.CONVERGES
    whole_updates = True
    counts_own = True
    compresses = True
    extra: ClassVar[int]
    """How many numbers a worker keeps of each parameter besides: its anchor, its way there, its outer momentum."""

    @abstractmethod  # what happens at a meeting is for heirs to say
    def __init__(self, setup: Setup, options: PeriodicOptions, outer: Outer, fragments: Fragments) -> None:
        self._peers, self._outer, self._fragments = setup.world, outer, fragments
        self._interval = options.every // fragments.count
        self._rounds = Rounds(setup.world, options)
        self.meets_after = self._interval if options.quorum < 1 else 1
        self._sums = make_reducer(setup.world, setup.compressor, setup.model_world)
        self._anchors: list[torch.Tensor] = []
        self._momenta: list[torch.Tensor] = []
        self._shown: list[torch.Tensor] | None = None
        self._seen = [0.0] * fragments.count
        self._travelling: list[Travelling] = []
        self._step, self._stop = -1, -1
        self._alike = True
        """Whether all workers have the same parameters: no step since a meeting of the whole model."""
        trained = sum(local(p).numel() * p.itemsize for p in setup.model.parameters() if p.requires_grad)
        bucket_mb = min(options.bucket_mb, max(trained / fragments.count / 2**20, 2**-10))
        lone = World.alone(setup.world.device)
        apart = replace(setup, world=lone, compressor=None, deterministic=False)
        super().__init__(apart, BucketOptions(bucket_mb), owners=setup.world)

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        del workers
        each = parameters * itemsize
        return Memory(each, each, each * state_per_parameter, cls.extra * each)

    # Where things lie.

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

    def publish(self) -> None:
        return

    # Steps.

    def start(self, step: int, memo: object) -> None:
        super().start(step, memo)
        self._step = step - 1

    def claim(self, step: int, stop: int) -> int | None:
        self._stop = stop
        return super().claim(max(step, self._step + 1), stop)

    def first_part(self, step: int, own: int) -> int:
        self._step = step
        return super().first_part(step, own)

    def through(self, step: int) -> int:
        del step
        return self._step

    def finish(self, tally: Tally) -> Tally:
        # Of a pipeline, only the last stage has counted; all stages of a model must weigh alike.
        count = float(self._model_world.gather_numbers([tally.count]).max())
        self._seen = [seen + count for seen in self._seen]
        return super().finish(tally)

    def norm(self) -> float:
        squares = sum(b.share * sum_of_squares([self._gradients[b.index]]) for b in self.buckets)
        return root_of_sum(squares, self.world, self._model_world)

    def update(self, factor: float, limit: float | None) -> None:
        super().update(factor, limit)
        self._meet()

    def drop(self) -> None:
        super().drop()
        self._meet()

    def _meet(self) -> None:
        """After a step: meet, if it is time or the others call."""
        self._alike = False
        done = self._step + 1
        number = -(-done // self._interval)
        if done % self._interval == 0:
            self._rounds.arrive(number)
        elif self._rounds.called(number):
            done = number * self._interval
            self._step = done - 1
        for fragment in [f for f in self._travelling if f.due <= done]:
            self._take_in(fragment, late=True)
        if done == self._stop:
            self.conclude()
        elif done % self._interval == 0:
            fragment = self._set_out(number % self._fragments.count, done + self._fragments.delay)
            if self._fragments.delay == 0:
                self._take_in(fragment, late=False)

    def conclude(self) -> None:
        for fragment in list(self._travelling):
            self._take_in(fragment, late=True)
        for index in range(self._fragments.count if not self._alike else 0):
            self._take_in(self._set_out(index, self._step + 1), late=False)
        self._alike = True

    def _set_out(self, index: int, due: int) -> Travelling:
        """The outer gradients of a fragment begin to travel."""
        counts = self._peers.gather_numbers([self._seen[index]])[:, 0].tolist()
        weight = counts[self._peers.rank] / sum(counts) if sum(counts) else 1 / self._peers.size
        self._seen[index] = 0.0
        sums = []
        for bucket in self._buckets_of(index):
            gradient = torch.sub(self._anchors[bucket.index], self.vectors[bucket.index]).mul_(weight)
            sums.append((bucket, gradient, self._sums.all_reduce(bucket, gradient)))
        self._travelling.append(Travelling(due, sums))
        return self._travelling[-1]

    def _take_in(self, fragment: Travelling, late: bool) -> None:
        """The sums of a fragment are there, or waited for: move its anchors, and go on from them.

        `late`: steps have been made since it set out, whose worth must not be lost.
        """
        self._travelling.remove(fragment)
        for bucket, gradient, handle in fragment.sums:
            handle.wait()
            anchor, mine = self._anchors[bucket.index], self.vectors[bucket.index]
            self._outer.step(anchor, gradient, self._momenta[bucket.index] if self._momenta else None)
            if late:
                mine.lerp_(anchor, 1 - self._fragments.mix)
            else:
                mine.copy_(anchor)
        self._alike = self._fragments.count == 1 and not late

    def _buckets_of(self, index: int) -> list[Bucket]:
        count = len(self.buckets)
        return [b for b in self.buckets if b.index * self._fragments.count // count == index]

    # What there is to see and to save.

    def fetch(self) -> None:
        for fragment in list(self._travelling):
            self._take_in(fragment, late=True)
        self._shown = None if self._alike else self._mean()

    def held(self) -> list[Held]:
        return super().held() if self._shown is None else self._with_frozen(self._shown)

    def parameters(self) -> dict[str, torch.Tensor]:
        if self._alike:
            return super().parameters()
        shapes = {name: local(p).shape for name, p in self.module.named_parameters()}
        return {h.name: h.tensor.reshape(shapes[h.name]).clone() for h in self._with_frozen(self._mean())}

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self._alike:
            yield
            return
        own = [vector.clone() for vector in self.vectors]
        for vector, mean in zip(self.vectors, self._mean(), strict=True):
            vector.copy_(mean)
        try:
            yield
        finally:
            for vector, mine in zip(self.vectors, own, strict=True):
                vector.copy_(mine)

    def owned(self, saving: bool) -> list[Owned]:
        found = [Owned("outer", h, alike=True) for h in self._views(self._momenta)]
        if not (saving and self._alike):
            found += [Owned("anchor", held, alike=True) for held in self._views(self._anchors)]
            found += [Owned("local", held) for held in self._views(self.vectors)]
        return found + own_optimizer_state(self) + unsent(self._sums, saving)

    def warm(self) -> dict[str, torch.Tensor]:
        return self._sums.warm()

    def warm_up(self, found: Mapping[str, torch.Tensor]) -> None:
        self._sums.warm_up(found)

    def numbers(self) -> dict[str, Any]:
        return {"seen": list(self._seen)}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
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

    def _views(self, vectors: list[torch.Tensor]) -> list[Held]:
        return [
            Held(piece.name, piece.offset, vector[piece.start : piece.start + piece.numel])
            for bucket, vector in zip(self.buckets if vectors else (), vectors, strict=True)
            for piece in pieces_of(bucket, 0, bucket.size)
        ]

    def _by_name(self, vectors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {held.name: held.tensor for held in self._views(vectors)}

    def _with_frozen(self, vectors: list[torch.Tensor]) -> list[Held]:
        found = {held.name: held for held in self._views(vectors)}
        return [found.get(held.name, held) for held in super().held()]
