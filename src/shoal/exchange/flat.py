"""The flat-bucket mechanism under ddp, zero1, zero2 and shared.

Parameters become views of a few long vectors (world/buckets.py). During backward each finished gradient is
copied into its bucket, and a full bucket goes out at once, while backward goes on with earlier layers. Buckets
leave in a fixed order, so that all ranks run the same collectives in the same order even when their gradients
become ready in different ones.

What differs between the exchanges is small, and each says it in its own file: where the vectors live, what
happens to a full bucket, which range of it this worker updates, and how fresh parameters reach the others.

    exchange   a full bucket is            this worker updates     then
    ddp        all-reduced                 everything              -
    zero1      reduce-scattered in place   its slice               all-gather of parameters
    zero2      reduce-scattered, freed     its slice               all-gather of parameters
    shared     summed where it lies        its slice               a barrier: there is one copy

Deterministic mode. Sums are always taken in rank order. With several micro-batches zero2 must reduce after each
one, while the others would rather add up locally and reduce once; the two round differently. In deterministic
mode all of them do what zero2 does, into a vector of the slice's size, and so agree bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from shoal.exchange.arrivals import Arrivals
from shoal.exchange.base import (
    Exchange,
    Held,
    Owned,
    State,
    Tally,
    back_propagate,
    detached,
    trainable,
)
from shoal.exchange.here import is_cut, local, put
from shoal.exchange.norms import root_of_sum, sum_of_squares
from shoal.exchange.owned import lay_out_keeping, leave_unused, unsent
from shoal.exchange.readiness import ForwardOrder
from shoal.exchange.reducers import make_reducer
from shoal.exchange.setup import BucketOptions, Setup
from shoal.exchange.state import Kept, cut_state, join_state
from shoal.optimizer import (
    make_optimizer,
    move_optimizer,
    names_in_groups,
    prepare_momentum,
    refuse_sparse,
    refuse_unless_elementwise,
    step_scaled,
)
from shoal.world.buckets import Bucket, Piece, lay_out, pieces_of, slice_of
from shoal.world.memory import SharedMemoryUnavailable
from shoal.world.world import Handle, World


class FlatExchange(Exchange):
    """Shared by the flat-bucket exchanges; abstract."""

    Options: ClassVar[type] = BucketOptions
    reduces_each_micro_batch = False
    """True if a gradient cannot wait in full for the last micro-batch."""

    def __init__(self, setup: Setup, options: BucketOptions, owners: World | None = None) -> None:
        self.world = setup.world
        self.owners = owners or setup.world
        """The workers among which every bucket is cut into slices."""
        # What comes out of a compressor does not depend on the order of a sum: there are no bits to keep alike.
        self.deterministic = setup.deterministic and setup.compressor is None
        self.each = self.reduces_each_micro_batch or (self.deterministic and setup.accumulate > 1)
        self._model_world, self._shares = setup.model_world, setup.shares
        self.trained = trainable(setup.model)
        self._capacity = int(options.bucket_mb * 2**20)
        made = make_optimizer(setup.make_optimizer, self.trained)
        refuse_sparse(made, type(self).__name__.lower())
        if not self.whole_updates or any(is_cut(p) for p in self.trained.values()):
            refuse_unless_elementwise(made, type(self).__name__.lower())
        self._groups = names_in_groups(made, self.trained, setup.model)
        self.given = made
        """The optimizer as the user made it, with the user's settings."""
        self.order = list(setup.order) or list(reversed(self.trained))
        """Parameters in the order their gradients become ready; at first a guess: the last layer's first."""
        self._watch: ForwardOrder | None = None
        self.reducer = make_reducer(setup.world, setup.compressor, setup.model_world)
        """How full buckets are summed."""
        self.module = setup.model
        self._order_is_seen = False
        self._lay_out()
        self.optimizer = move_optimizer(made, self._groups, self._targets())

    def _lay_out(self) -> None:
        """Put parameters into buckets by `self.order`, and watch for their gradients."""
        sizes = [(n, local(self.trained[n]).numel(), self.trained[n].dtype) for n in self.order]
        self.buckets: tuple[Bucket, ...] = lay_out(sizes, self.owners.size, self._capacity, self._shares)
        self.ranges = [
            (0, b.size) if self.whole_updates else slice_of(b, self.owners.size, self.owners.rank)
            for b in self.buckets
        ]
        self.vectors = self.allocate()
        self._adopt_parameters()
        self.pieces: list[tuple[Piece, torch.Tensor]] = [
            (piece, self._target(piece))
            for bucket, (start, stop) in zip(self.buckets, self.ranges, strict=True)
            for piece in pieces_of(bucket, start, stop)
        ]
        self._results = [self.reduced(bucket) for bucket in self.buckets]
        self._gradients_of_pieces = [self._gradient(piece, target) for piece, target in self.pieces]
        self._arrivals = Arrivals(self.trained, self.buckets, self)
        shapes = {name: local(p).shape for name, p in self.trained.items()}
        lay_out_keeping(self.reducer, self.buckets, shapes, scattered=not self.whole_updates)

    def lay_out_again(self, order: list[str]) -> None:
        """Move everything to buckets filled in another order. Every rank calls it with the same one."""
        self._order_is_seen = True
        if order == self.order:
            return
        state, before = self.optimizer_state(), self.order
        self._arrivals.close()
        self.order = order
        try:
            self._lay_out()
        except SharedMemoryUnavailable:  # for all ranks alike, and the old order is right too, only later
            self.order = before
            self._lay_out()
        targets = self._targets()
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [t for name in names for t in targets.get(name, ())]
        self.optimizer.state.clear()
        prepare_momentum(self.optimizer)
        self.load_optimizer_state(state)

    def _targets(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for piece, target in self.pieces:
            found.setdefault(piece.name, []).append(target)
        return found

    # What each exchange says for itself.

    @abstractmethod
    def allocate(self) -> list[torch.Tensor]:
        """Make what `self.buckets` needs; returns one vector per bucket that the parameters will be views of."""

    @abstractmethod
    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        """The vector that this bucket's gradients are to be copied into now."""

    @abstractmethod
    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        """Start reducing a full bucket."""

    @abstractmethod
    def reduced(self, bucket: Bucket) -> torch.Tensor:
        """Where the reduced gradient of this worker's range of a bucket is after finish: always the same place."""

    @abstractmethod
    def publish(self) -> None:
        """After the update: everybody sees the new parameters."""

    def settle(self) -> None:
        """Every bucket of a micro-batch has been reduced; vectors may be written again."""

    # The contract.

    def begin(self) -> None:
        if not self._order_is_seen and self._watch is None:
            self._watch = ForwardOrder(self.module, self.trained)
        self._arrivals.open_step()
        self.reducer.begin()

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        self._see_order()
        self._arrivals.open_micro_batch(reduce=last or self.each, counts=weight != 0.0)
        back_propagate(loss, weight)
        self._arrivals.close_micro_batch()

    def collect(self) -> None:
        self._see_order()
        self._arrivals.open_micro_batch(reduce=True)
        self._arrivals.take_all()
        self._arrivals.close_micro_batch()

    def _see_order(self) -> None:
        if self._watch is not None:
            seen, self._watch = self._watch.close(), None
            self.lay_out_again(self.agree(seen))
            self._arrivals.open_step()

    def agree(self, seen: list[str]) -> list[str]:
        """One order for all who will sum their gradients. Collective."""
        found: list[str] = self.world.gather_values(seen)[0]
        return found

    def finish(self, tally: Tally) -> Tally:
        used = [float(flag) for flag in self._arrivals.used]
        numbers = torch.tensor([tally.total, tally.count, *used], dtype=torch.float64)
        agreed = self.world.all_reduce(numbers)  # its latency hides behind the last buckets
        self._arrivals.wait()
        agreed.wait()
        self.reducer.settle()
        total, count, *users = numbers.tolist()
        self._arrivals.used = [flag > 0 for flag in users]
        if not all(self._arrivals.used):
            unused = [piece for piece, _ in self.pieces if not self._arrivals.used_name(piece.name)]
            leave_unused(self.reducer, self.buckets, unused, self._results, self.ranges)
        return Tally(total, count)

    def norm(self) -> float:
        # Each worker looks at its own slice even where it holds everything: less to read, and the same sum
        # in the same order under every exchange.
        mine = []
        for bucket, result, (start, _) in zip(self.buckets, self._results, self.ranges, strict=True):
            low, high = slice_of(bucket, self.owners.size, self.owners.rank)
            mine.append(bucket.share * sum_of_squares([result[low - start : high - start]]))
        return root_of_sum(sum(mine), self.owners, self._model_world)

    def update(self, factor: float, limit: float | None) -> None:
        for (piece, target), gradient in zip(self.pieces, self._gradients_of_pieces, strict=True):
            if self._arrivals.used_name(piece.name):  # others keep None, which optimizers pass over
                target.grad = gradient
        step_scaled(self.optimizer, lambda: self._results, factor, limit)
        for _, target in self.pieces:
            target.grad = None
        self.publish()

    def drop(self) -> None:
        self.reducer.drop()
        self.publish()

    def rescale(self, by: float) -> None:
        if by != 1.0:
            self.reducer.rescale(by)

    def owned(self, saving: bool) -> list[Owned]:
        return unsent(self.reducer, saving)

    def warm(self) -> dict[str, torch.Tensor]:
        return self.reducer.warm()

    def warm_up(self, found: Mapping[str, torch.Tensor]) -> None:
        self.reducer.warm_up(found)

    def close(self) -> None:
        self.reducer.close()

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for bucket in self.buckets:
            whole = self._whole(bucket, self.reduced(bucket))
            for place in bucket.places:
                if self._arrivals.used_name(place.name):
                    shape = local(self.trained[place.name]).shape
                    found[place.name] = whole[place.start : place.start + place.numel].view(shape).clone()
        return {name: found[name] for name in self.trained if name in found}

    def targets(self) -> list[Held]:
        return [Held(piece.name, piece.offset, target) for piece, target in self.pieces]

    def optimizer_state(self) -> State:
        if self.whole_updates:
            state = self.optimizer.state
            return {piece.name: detached(state[target]) for piece, target in self.pieces if target in state}
        return join_state(self._kept())

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        cut_state(self._kept(), state)

    def _kept(self) -> Kept:
        shapes = {name: local(p).shape for name, p in self.trained.items()}
        return Kept(shapes, self.buckets, self.pieces, self.optimizer, self.owners)

    def _whole(self, bucket: Bucket, mine: torch.Tensor) -> torch.Tensor:
        if self.whole_updates:
            return mine
        whole = torch.empty(bucket.size, dtype=mine.dtype, device=mine.device)
        self.owners.all_gather(whole, mine.contiguous()).wait()
        return whole

    def _adopt_parameters(self) -> None:
        for bucket, vector in zip(self.buckets, self.vectors, strict=True):
            for place in bucket.places:
                parameter = self.trained[place.name]
                view = vector[place.start : place.start + place.numel].view(local(parameter).shape)
                view.copy_(local(parameter).detach())
                put(parameter, view)

    def _gradient(self, piece: Piece, target: torch.Tensor) -> torch.Tensor:
        start = piece.start - self.ranges[piece.bucket][0]
        return self._results[piece.bucket][start : start + piece.numel].view(target.shape)

    def _target(self, piece: Piece) -> torch.Tensor:
        parameter = self.trained[piece.name]
        if self.whole_updates:
            return local(parameter)
        return self.vectors[piece.bucket][piece.start : piece.start + piece.numel]
