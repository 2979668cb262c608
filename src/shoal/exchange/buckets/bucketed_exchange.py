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
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch

from shoal.exchange.buckets.backward_order import ForwardOrder
from shoal.exchange.buckets.gradient_buckets import GradientBuckets
from shoal.exchange.buckets.norms import root_of_sum, squares_of
from shoal.exchange.buckets.optimizer_state import Kept, cut_state, join_state
from shoal.exchange.buckets.users_optimizer import users_optimizer
from shoal.exchange.contract import (
    Exchange,
    ExtraState,
    LocalShard,
    State,
    StepView,
    Tally,
    back_propagate,
    back_propagate_into,
    check_members,
    check_not_torn,
    detached,
    trainable,
)
from shoal.exchange.frozen import check_frozen, mark_frozen
from shoal.exchange.local_tensor import is_replaced, local, put
from shoal.exchange.reduce.make_reducer import make_reducer
from shoal.exchange.reduce.reducer import Reducer
from shoal.exchange.reduce.residuals import lay_out_keeping, leave_unused, put_back, unsent
from shoal.exchange.setup import BucketOptions, Setup
from shoal.optimizer import move_optimizer, prepare_momentum, step_scaled
from shoal.world.buckets import Bucket, Piece, lay_out, pieces_of, slice_of
from shoal.world.shm.memory import SharedMemoryUnavailable
from shoal.world.world import Handle, World


class BucketedExchange(Exchange):
    """Shared by the flat-bucket exchanges; abstract."""

    Options: ClassVar[type] = BucketOptions
    reduces_each_micro_batch = False
    """True if a gradient cannot wait in full for the last micro-batch."""

    world: World
    """The data-parallel group: ranks that sum their gradients."""
    owners: World
    """The workers among which every bucket is cut into slices."""
    reducer: Reducer
    """How full buckets are summed."""

    def __init__(self, setup: Setup, options: BucketOptions) -> None:
        self._compressor = setup.compressor
        self._members = setup.world
        """All data-parallel ranks: the same parameters, different samples."""
        self._model_world = setup.model_world
        self.spans = setup.spans
        self._applied = False
        """Whether the present step has changed parameters that others have not seen yet."""
        self.connect(setup.world)
        # What comes out of a compressor does not depend on the order of a sum: there are no bits to keep alike.
        self.deterministic = setup.deterministic and setup.compressor is None
        self.each = self.reduces_each_micro_batch or (self.deterministic and setup.accumulate > 1)
        self._shares = setup.shares
        self.trained = trainable(setup.model)
        self._capacity = int(options.bucket_mb * 2**20)
        who = type(self).__name__.lower()
        made, self._groups = users_optimizer(setup, self.trained, who, slices=not self.whole_updates)
        self.given = made
        """The optimizer as the user made it, with the user's settings."""
        self.order = list(setup.order) or list(reversed(self.trained))
        """Parameters in the order their gradients become ready; at first a guess: the last layer's first."""
        self._watch: ForwardOrder | None = None
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
        self._gradient_buckets = GradientBuckets(self.trained, self.buckets, self)
        shapes = {name: local(p).shape for name, p in self.trained.items()}
        lay_out_keeping(self.reducer, self.buckets, shapes, scattered=not self.whole_updates)

    def lay_out_again(self, order: list[str]) -> None:
        """Move everything to buckets filled in another order. Every rank calls it with the same one."""
        self._order_is_seen = True
        if order == self.order:
            return
        # By parameter, because slices are cut at other places afterwards.
        # Collective where slices are cut: all ranks join their slices of the state, before anything moves.
        state, before = self.optimizer_state(), self.order
        self._gradient_buckets.close()
        self.order = order
        try:
            self._lay_out()
        except SharedMemoryUnavailable:  # for all ranks alike, and the old order is right too, only later
            self.order = before
            self._lay_out()
        self._retarget()
        self.optimizer.state.clear()
        prepare_momentum(self.optimizer)
        self.load_optimizer_state(state)

    def _retarget(self) -> None:
        """The optimizer updates the tensors where they lie now."""
        targets = self._targets()
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [t for name in names for t in targets.get(name, ())]

    def _targets(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for piece, target in self.pieces:
            found.setdefault(piece.name, []).append(target)
        return found

    # What each exchange says for itself.

    def connect(self, world: World) -> None:
        """Talk to these members: at first, and again when a group is replaced. Collective."""
        self.world = world
        self.owners = world
        self.reducer = make_reducer(world, self._compressor, self._model_world)

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

    def settle(self) -> None:
        """Every bucket of a micro-batch has been reduced; vectors may be written again."""

    @abstractmethod
    def hand_out(self) -> None:
        """After the update, or instead of it: everybody sees this worker's parameters as they are now."""

    def take_over(self, name: str, home: torch.Tensor) -> None:
        """The user has given a parameter other memory: what it holds now goes where it belongs."""
        home.copy_(local(self.trained[name]).detach())
        put(self.trained[name], home)

    # The contract.

    def begin(self, view: StepView) -> None:
        del view
        for name, home in self._homes:
            if is_replaced(self.trained[name], home):
                self.take_over(name, home)
        if not self._order_is_seen and self._watch is None:
            # Only in the first step: the order of the forward pass, turned round, is that in which gradients will come.
            # DDP does the like after its first step.
            self._watch = ForwardOrder(self.module, self.trained)
        # A gradient left at a parameter would be added to by autograd, and count as one of this step.
        self._gradient_buckets.drop_strays()
        self._gradient_buckets.open_step()
        self.reducer.begin()

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        self._see_order()
        self._gradient_buckets.open_micro_batch(reduce=last or self.each, counts=weight != 0.0)
        back_propagate(loss, weight)
        self._gradient_buckets.close_micro_batch()

    @property
    def sends_terms(self) -> bool:
        return self.each or self._watch is not None

    def add_term(self, loss: torch.Tensor | None, weight: float, retain_graph: bool) -> None:
        self._see_order()
        self._gradient_buckets.open_micro_batch(reduce=self.each, counts=weight != 0.0)
        back_propagate_into(self.trained.values(), loss, weight, retain_graph)
        self._gradient_buckets.close_micro_batch()

    def close_terms(self) -> None:
        if (
            not self.each
        ):  # what was added up here goes out in one piece; otherwise every term has gone already
            self._gradient_buckets.open_micro_batch(reduce=True)
            self._gradient_buckets.close_micro_batch()

    def collect(self) -> None:
        self._see_order()
        self._gradient_buckets.open_micro_batch(reduce=True)
        self._gradient_buckets.take_all()
        self._gradient_buckets.close_micro_batch()

    def _see_order(self) -> None:
        if self._watch is not None:
            seen = self._watch.close()
            self._watch = None
            self.lay_out_again(self.agree(seen))
            self._gradient_buckets.open_step()

    def agree(self, seen: list[str]) -> list[str]:
        """One order for all who will sum their gradients. Collective."""
        # Samples may take different ways through the model; rank 0's order does for all. Any one is right.
        found: list[str] = self.world.gather_values(seen)[0]
        return found

    def finish(self, tally: Tally) -> Tally:
        used = [float(flag) for flag in self._gradient_buckets.used]
        if not all(used):
            mark_frozen(used, self._gradient_buckets.names, self.trained, self.world.size)
        # float64: in float32 a count above 2^24 is not exact any more.
        numbers = torch.tensor([tally.total, tally.count, *used], dtype=torch.float64, device="cpu")
        # `used` must be agreed on: an optimizer that skips a parameter on one rank only would let replicas drift apart.
        agreed = self.world.all_reduce(numbers)  # its latency hides behind the last buckets
        self._gradient_buckets.wait()
        agreed.wait()
        self.reducer.settle()
        total, count, *users = numbers.tolist()
        if min(users, default=0.0) < 0.0:
            check_frozen(users, self._gradient_buckets.names, self.trained, self.world.size)
        self._gradient_buckets.used = [flag > 0 for flag in users]
        if not all(self._gradient_buckets.used):
            unused = [piece for piece, _ in self.pieces if not self._gradient_buckets.used_name(piece.name)]
            # A compressor may send an old residual of a parameter that is not updated now: it must come back.
            leave_unused(self.reducer, self.buckets, unused, self._results, self.ranges)
        return Tally(total, count)

    def add_gradients(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        for name in gradients:
            self._gradient_buckets.use(name)
        for (piece, _), summed in zip(self.pieces, self._gradients_of_pieces, strict=True):
            if piece.name in gradients:
                part = gradients[piece.name].reshape(-1)[piece.offset : piece.offset + piece.numel]
                summed.add_(part.view(summed.shape), alpha=weight)

    def withhold(self, names: Collection[str]) -> None:
        self._gradient_buckets.forget(names)
        withheld = [piece for piece, _ in self.pieces if piece.name in names]
        leave_unused(self.reducer, self.buckets, withheld, self._results, self.ranges)
        for (piece, _), summed in zip(self.pieces, self._gradients_of_pieces, strict=True):
            if piece.name in names:
                summed.zero_()  # nothing of it is in the norm

    def grad_norm(self) -> float:
        # Each worker looks at its own slice even where it holds everything: less to read, and the same sum
        # in the same order under every exchange.
        mine = []
        for bucket, result, (start, _) in zip(self.buckets, self._results, self.ranges, strict=True):
            low, high = slice_of(bucket, self.owners.size, self.owners.rank)
            mine.append(result[low - start : high - start])
        shares = zip(self.buckets, squares_of(mine), strict=True)
        whole = sum([bucket.share * squares for bucket, squares in shares])
        return root_of_sum(whole, self.owners, self._model_world)

    def apply(self, factor: float, clamp: float | None) -> None:
        for (piece, target), gradient in zip(self.pieces, self._gradients_of_pieces, strict=True):
            if self._gradient_buckets.used_name(piece.name):  # others keep None, which optimizers pass over
                # Views of the reduced vector, no copies: the optimizer reads where the collective wrote.
                target.grad = gradient
        step_scaled(self.optimizer, lambda: self._results, factor, clamp)
        for _, target in self.pieces:
            target.grad = None
        # If a peer is lost before `publish`, `reopen` makes up for it: the update cannot be taken back.
        self._applied = True

    def publish(self) -> None:
        self.hand_out()
        self._applied = False

    def discard(self) -> None:
        self.reducer.drop()
        self.hand_out()

    def abort(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._gradient_buckets.abandon()
        if not self._applied:
            self.reducer.drop()  # what compression had left over of this step's gradients goes with it
        self._members.abort()
        self.reducer.close()

    def reopen(self, world: World, model_world: World) -> None:
        check_members(self._members, world)
        check_not_torn(world, self._applied)
        # The optimizer finds its state by tensor, and `_lay_out` makes other tensors for the same pieces.
        before = [self.optimizer.state.pop(target, None) for _, target in self.pieces]
        residuals = {extra.held.name: extra.held.tensor for extra in unsent(self.reducer, saving=True)}
        self._members = world
        self._model_world = model_world
        self.connect(world)
        # Into other memory: a collective that was under way may still write into the old.
        self._lay_out()
        put_back(self.reducer, residuals)
        self._retarget()
        for (_, target), state in zip(self.pieces, before, strict=True):
            if state is not None:
                self.optimizer.state[target] = state
        if self._applied:
            self.publish()

    def rescale(self, by: float) -> None:
        if by != 1.0:
            self.reducer.rescale(by)

    def extras(self, saving: bool) -> list[ExtraState]:
        return unsent(self.reducer, saving)

    def warm(self) -> dict[str, torch.Tensor]:
        return self.reducer.warm()

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        self.reducer.warm_start(found)

    def close(self) -> None:
        self.reducer.close()

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for bucket in self.buckets:
            whole = self._whole(bucket, self.reduced(bucket))
            for place in bucket.places:
                if self._gradient_buckets.used_name(place.name):
                    shape = local(self.trained[place.name]).shape
                    found[place.name] = whole[place.start : place.start + place.numel].view(shape).clone()
        return {name: found[name] for name in self.trained if name in found}

    def gradient_shards(self) -> list[LocalShard]:
        placed = zip(self.pieces, self._gradients_of_pieces, strict=True)
        used = self._gradient_buckets.used_name
        return [LocalShard(p.name, p.offset, gradient) for (p, _), gradient in placed if used(p.name)]

    def optimizer_shards(self) -> list[LocalShard]:
        return [LocalShard(piece.name, piece.offset, target) for piece, target in self.pieces]

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
        self._homes: list[tuple[str, torch.Tensor]] = []
        """Where each parameter lives; one of no elements lives nowhere."""
        for bucket, vector in zip(self.buckets, self.vectors, strict=True):
            for place in bucket.places:
                parameter = self.trained[place.name]
                # Parameters become views of the bucket: an all-gather into it is the new model, without copying.
                view = vector[place.start : place.start + place.numel].view(local(parameter).shape)
                view.copy_(local(parameter).detach())
                put(parameter, view)
                if place.numel:
                    self._homes.append((place.name, view))

    def _gradient(self, piece: Piece, target: torch.Tensor) -> torch.Tensor:
        start = piece.start - self.ranges[piece.bucket][0]
        return self._results[piece.bucket][start : start + piece.numel].view(target.shape)

    def _target(self, piece: Piece) -> torch.Tensor:
        parameter = self.trained[piece.name]
        if self.whole_updates:
            return local(parameter)
        return self.vectors[piece.bucket][piece.start : piece.start + piece.numel]
