"""World's collectives where its group is gloo: between hosts, or because somebody asked for it.

A collective of few bytes is one exchange: each rank gives each other the word of its call, as in shared memory
(`shm/calls.py`), and its data behind it (`room_for`). Whatever ranks call, that exchange is the same collective of
gloo's and as long, so it ends on all of them. All words are compared before a number is used: ranks whose calls differ
are told so, all of them, and what they called.

Larger ones would pay for an exchange more. They are compared the 1st, 2nd, 4th, 8th … time that this rank makes that
call, which finds what was written wrong at its first use and costs nothing in the long run. Then

- an all-to-all, an all-gather and a reduce-scatter are sent at once, beside the words. Gloo matches messages by a
  number, which is drawn from the word here: those of other calls never meet.
- an all-reduce and a broadcast are gloo's own, which would end the process that gets more than it expects. They begin
  when all words are there: on a thread and in a group of gloo's that nothing else uses, so that whoever issues them
  need not wait, and they cannot change places with what others do in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from shoal.torch_private import PrefixStore, Store, c10d
from shoal.world.gloo import from_rank, gloo_group
from shoal.world.network.opening import Opening, Openings, room_for
from shoal.world.network.stage_threads import StagedTask, Stages
from shoal.world.shm.calls import kind_of, reduction_of, word_of
from shoal.world.shm.flatten import as_bytes, numbers_and_back

_TAGS = 1_073_741_789
"""The largest prime below 2³⁰: tags of data are what remains of their word."""
_TIMEOUT = timedelta(minutes=10)

_SUM = reduction_of(ReduceOp.SUM)
ALL_REDUCE = kind_of("all_reduce") | _SUM
REDUCE_SCATTER = kind_of("reduce_scatter") | _SUM
ALL_GATHER = kind_of("all_gather")
_ALL_TO_ALL = kind_of("all_to_all")
BROADCAST = kind_of("broadcast")
_DISAGREED = kind_of("what its own host did not agree on")


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Network:
    """The collectives of one gloo group. Each returns at once; its tensors belong to it until wait() returns."""

    def __init__(
        self, group: ProcessGroup, rank: int, size: int, store: Store | None = None, label: str = ""
    ) -> None:
        """`store` and `label` are where ranks meet for the group of large all-reduces and broadcasts, if any come."""
        self._group = group
        self._rank = rank
        self._size = size
        self.room = room_for(size)
        self._store = store
        self._label = label
        self._openings = Openings(group, rank, size)
        self._last: Opening | None = None
        self._own: ProcessGroup | None = None
        self._stages: Stages | None = None

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum over all ranks, in place: small ones in rank order, else in gloo's."""
        call = word_of(ALL_REDUCE, [tensor])
        if tensor.nbytes > self.room:
            return self._queue(call, lambda group: group.allreduce([tensor], c10d.AllreduceOptions()))
        flat, after = numbers_and_back(tensor)
        opening = self._open(call, [as_bytes(flat)] * self._size)
        return Compared(opening, [lambda: _add(opening.received(flat.clone()), flat), *after])

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """`tensor` of every rank becomes that of rank `source`."""
        call = word_of(BROADCAST, [tensor], root=source)
        if tensor.nbytes > self.room:
            return self._queue(call, lambda group: group.broadcast([tensor], from_rank(source)))
        if source == self._rank:
            return Compared(self._open(call, [as_bytes(tensor)] * self._size), [])
        flat, after = numbers_and_back(tensor)
        opening = self._open(call)
        return Compared(opening, [lambda: flat.copy_(opening.received(flat)[source]), *after])

    def reduce_scatter(self, out: Tensor, whole: Tensor, call: int | None = None) -> Compared:
        """`out` becomes the sum, in rank order, of slice r of all ranks' `whole`, of which it may be a part itself.

        Gloo's own sends twice the bytes, and its order of summing depends on where an element lies.
        With `call`, that is what is compared, and it always is.
        """
        gives = self._cut(whole)
        always = call is not None
        call = word_of(REDUCE_SCATTER, [out]) if call is None else call
        if out.nbytes <= self.room:
            opening = self._open(call, [as_bytes(give) for give in gives])
            return Compared(opening, [lambda: _add(opening.received(gives[self._rank].clone()), out)])
        parts = torch.empty_like(whole).chunk(self._size)
        compared, works = self._beside(call, parts, gives, always)

        def add() -> None:
            parts[self._rank].copy_(gives[self._rank])  # where it lies may be where the sum is to be
            _add(parts, out)

        return Compared(compared, [add], works)

    def all_gather(self, places: Sequence[Tensor], part: Tensor, call: int | None = None) -> Compared:
        """The parts of all ranks, each straight into its place: gloo's own copies everything twice.

        With `call`, that is what is compared, and it always is.
        """
        always = call is not None
        call = word_of(ALL_GATHER, [part]) if call is None else call
        return self._move(call, places, [part] * self._size, always)

    def all_to_all(self, out: Tensor, whole: Tensor) -> Compared:
        """Slice r of `whole` goes to rank r."""
        return self._move(word_of(_ALL_TO_ALL, [whole]), self._cut(out), self._cut(whole))

    def compare(self, call: int) -> None:
        """All have come to this call; the caller blocks."""
        opening = self._open(call)
        opening.wait()
        opening.close()

    def broadcast_now(self, data: Tensor, source: int) -> None:
        """A broadcast that has been compared, in a group that is nobody else's; the caller blocks."""
        self._group.broadcast([data], from_rank(source)).wait()

    def disagree(self) -> None:
        """Tell the others that this rank cannot come: the workers of its own host have called different things."""
        self._last = self._open(_DISAGREED)  # kept until it is sent

    def close(self) -> None:
        """Let its thread end."""
        if self._stages is not None:
            self._stages.close()

    def _open(self, call: int, parts: Sequence[Tensor] = ()) -> Opening:
        return self._openings.open(self._openings.number(call), parts)

    def _beside(
        self, call: int, gets: Sequence[Tensor], gives: Sequence[Tensor], always: bool
    ) -> tuple[Opening | None, list[Work]]:
        """Data under a tag of their call's own, and the words beside them if it is time to compare them."""
        word = self._openings.number(call)
        opening = self._openings.open(word) if always or self._openings.due(call) else None
        return opening, trade(self._group, self._rank, gets, gives, word % _TAGS)

    def _move(
        self, call: int, places: Sequence[Tensor], gives: Sequence[Tensor], always: bool = False
    ) -> Compared:
        """Every rank gives one part to each other; all are of one size."""
        mine = self._rank

        def keep() -> None:
            if places[mine].data_ptr() != gives[mine].data_ptr():
                places[mine].copy_(gives[mine])

        if gives[mine].nbytes <= self.room:
            opening = self._open(call, [as_bytes(give) for give in gives])

            def place() -> None:
                keep()
                for target, part in zip(places, opening.received(places[mine]), strict=True):
                    if target is not places[mine]:
                        target.copy_(part.view_as(target))

            return Compared(opening, [place])
        compared, works = self._beside(call, places, gives, always)
        return Compared(compared, [keep], works)

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        # chunk of an empty tensor gives one part, whatever the number asked for.
        return whole.chunk(self._size) if whole.numel() else [whole] * self._size

    def _queue(self, call: int, issue: Callable[[ProcessGroup], Work]) -> Handle:
        """A collective of gloo's own: at once, or by the thread when all ranks are known to call it."""
        if not self._openings.due(call):
            self._openings.number(call)
            return issue(self._group)
        if self._stages is None:
            self._stages = Stages(1, f"shoal-network-{self._rank}")
        opening = self._open(call)
        issued: list[Work] = []

        def step() -> None:
            opening.wait()
            opening.close()
            issued.append(issue(self._large()))

        return Queued(self._stages.hand_in([step]), issued)

    def _large(self) -> ProcessGroup:
        if self._store is None:
            return self._group
        if self._own is None:
            # A store's connection is busy while someone waits for a key, and the caller's thread may need it meanwhile.
            store = PrefixStore(self._label, self._store.clone())  # type: ignore[attr-defined]
            self._own = gloo_group(store, self._rank, self._size, _TIMEOUT)
        return self._own


class Compared:
    """A collective under way: compared, received, put in place."""

    def __init__(
        self, opening: Opening | None, after: Sequence[Callable[[], object]], works: Sequence[Work] = ()
    ) -> None:
        """Without an opening it is not compared this time."""
        self._opening = opening
        self._after = after
        self._works = works

    def wait(self) -> None:
        """Return when the results are there; raise what went wrong otherwise."""
        if self._opening is not None:
            self._opening.wait()
        for work in self._works:
            work.wait()
        for step in self._after:
            step()
        if self._opening is not None:
            self._opening.close()
        self._opening = None
        self._after = self._works = ()  # they hold tensors


class Queued:
    """A collective of gloo's own that a thread issues."""

    def __init__(self, task: StagedTask, issued: Sequence[Work]) -> None:
        self._task = task
        self._issued = issued

    def wait(self) -> None:
        """Return when the results are there; raise what went wrong otherwise."""
        self._task.wait()
        for work in self._issued:
            work.wait()


def trade(
    group: ProcessGroup, rank: int, gets: Sequence[Tensor], gives: Sequence[Tensor], tag: int
) -> list[Work]:
    """Every rank gives one tensor to each other, and gets one.

    Receiving comes first. A receiver tells gloo's sender that it is ready on the same connection, behind all that is
    being sent there; told later, the two directions take turns, and everything takes twice as long. Gloo's own
    all-to-all, all-gather and broadcasts do that as chance will have it.
    """
    size = len(gets)
    others = [(rank + step) % size for step in range(1, size)]  # not all to the same one at once
    got = [group.recv([gets[other]], other, tag) for other in reversed(others)]
    return got + [group.send([gives[other]], other, tag) for other in others]


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    """((r0 + r1) + r2) + …: the order that shared memory uses, so both ways give the same bits."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
