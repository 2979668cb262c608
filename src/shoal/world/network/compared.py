"""World's collectives where its group is gloo: between hosts, or because somebody asked for it.

Every collective begins with a message from each rank to each other: the word of its call, as in shared memory
(`shm/calls.py`), and behind it the data too if they are small (`room_for`). All words are compared before a number
is used, so ranks whose calls differ are told so, all of them, and what they called. For larger data

- an all-to-all, an all-gather and a reduce-scatter are sent at once, beside the words. Gloo matches messages by a
  number, which is drawn from the word here: those of other calls never meet.
- an all-reduce and a broadcast are gloo's own, which would end the process that gets more than it expects. They begin
  when all words are there: on a thread and in a group of gloo's that nothing else uses, so that whoever issues them
  need not wait, and they cannot change places with what others do in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from shoal.torch_private import PrefixStore, Store, c10d
from shoal.world.gloo import from_rank, gloo_group
from shoal.world.network.stage_threads import StagedTask, Stages
from shoal.world.shm.calls import SEQUENCE, kind_of, mismatch, reduction_of, word_of
from shoal.world.shm.flatten import as_bytes, numbers_and_back

_ROOM = 64 << 10
"""Bytes of small data that a rank sends in all: whole, to every other, they are there sooner than round a ring."""
_HEAD = 16
"""Bytes of a word and what follows it, so that numbers of every type lie at a multiple of their size."""
_WORDS = 0x53484F41
"""The tag of first messages. Those of a pair arrive in the order in which they were sent."""
_TAGS = 1_073_741_789
"""The largest prime below 2³⁰: tags of data are what remains of their word."""
_SEQUENCES = 4
_TIMEOUT = timedelta(minutes=10)

_SUM = reduction_of(ReduceOp.SUM)
ALL_REDUCE = kind_of("all_reduce") | _SUM
REDUCE_SCATTER = kind_of("reduce_scatter") | _SUM
ALL_GATHER = kind_of("all_gather")
_ALL_TO_ALL = kind_of("all_to_all")
BROADCAST = kind_of("broadcast")
_DISAGREED = kind_of("what its own host did not agree on")


def room_for(size: int) -> int:
    """Bytes of data to a rank that go behind the word, among so many ranks.

    >>> room_for(2), room_for(9)
    (65536, 8192)
    """
    return _ROOM // (size - 1) // _HEAD * _HEAD


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
        self._calls = 0
        self._last: Opening | None = None
        self._own: ProcessGroup | None = None
        self._stages: Stages | None = None

    def all_reduce(self, tensor: Tensor) -> Compared | Queued:
        """Sum over all ranks, in place: small ones in rank order, else in gloo's."""
        call = word_of(ALL_REDUCE, [tensor])
        if tensor.nbytes > self.room:
            return self._queue(call, lambda group: group.allreduce([tensor], c10d.AllreduceOptions()))
        flat, after = numbers_and_back(tensor)
        opening = self._open(call, [as_bytes(flat)] * self._size)
        return Compared(opening, [lambda: _add(opening.received(flat.clone()), flat), *after])

    def broadcast(self, tensor: Tensor, source: int) -> Compared | Queued:
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
        """
        gives = self._cut(whole)
        call = word_of(REDUCE_SCATTER, [out]) if call is None else call
        if out.nbytes <= self.room:
            opening = self._open(call, [as_bytes(give) for give in gives])
            return Compared(opening, [lambda: _add(opening.received(gives[self._rank].clone()), out)])
        opening = self._open(call)
        parts = torch.empty_like(whole).chunk(self._size)
        works = self._trade(opening.tag, parts, gives)

        def add() -> None:
            parts[self._rank].copy_(gives[self._rank])  # where it lies may be where the sum is to be
            _add(parts, out)

        return Compared(opening, [add], works)

    def all_gather(self, places: Sequence[Tensor], part: Tensor, call: int | None = None) -> Compared:
        """The parts of all ranks, each straight into its place: gloo's own copies everything twice."""
        call = word_of(ALL_GATHER, [part]) if call is None else call
        return self._move(call, places, [part] * self._size)

    def all_to_all(self, out: Tensor, whole: Tensor) -> Compared:
        """Slice r of `whole` goes to rank r."""
        return self._move(word_of(_ALL_TO_ALL, [whole]), self._cut(out), self._cut(whole))

    def compare(self, call: int) -> None:
        """All have come to this call; the caller blocks."""
        self._open(call).wait()

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
        self._calls += 1
        word = call | (self._calls % _SEQUENCES) << SEQUENCE
        return Opening(self._group, self._rank, self._size, word, parts)

    def _move(self, call: int, places: Sequence[Tensor], gives: Sequence[Tensor]) -> Compared:
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
        opening = self._open(call)
        return Compared(opening, [keep], self._trade(opening.tag, places, gives))

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        # chunk of an empty tensor gives one part, whatever the number asked for.
        return whole.chunk(self._size) if whole.numel() else [whole] * self._size

    def _trade(self, tag: int, gets: Sequence[Tensor], gives: Sequence[Tensor]) -> list[Work]:
        return trade(self._group, self._rank, gets, gives, tag)

    def _queue(self, call: int, issue: Callable[[ProcessGroup], Work]) -> Queued:
        """Have the thread issue a collective of gloo's own when all ranks are known to call it."""
        if self._stages is None:
            self._stages = Stages(1, f"shoal-network-{self._rank}")
        opening = self._open(call)
        issued: list[Work] = []

        def step() -> None:
            opening.wait()
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


class Opening:
    """The first messages of a collective: the word of every rank, and small data."""

    def __init__(self, group: ProcessGroup, rank: int, size: int, word: int, parts: Sequence[Tensor]) -> None:
        """`parts[r]`, as bytes, goes to rank r behind the word; without any, the word goes alone."""
        self._rank = rank
        self._word = word
        head = torch.tensor([_signed(word), 0], dtype=torch.int64, device="cpu").view(torch.uint8)
        if not parts:
            gives = [head] * size
        elif parts[0] is parts[-1]:
            gives = [torch.cat([head, parts[0]])] * size
        else:
            gives = [torch.cat([head, part]) for part in parts]
        # As long as the longest there are, though these may be shorter: what others send may be of another call.
        self._room = torch.empty(size, _HEAD + room_for(size), dtype=torch.uint8, device="cpu")
        self._works = trade(group, rank, self._room.unbind(), gives, _WORDS)

    @property
    def tag(self) -> int:
        """For the data of this call, and no other."""
        return self._word % _TAGS

    def wait(self) -> None:
        """All have come, to the same call; or raises `CollectiveMismatch`."""
        for work in self._works:
            work.wait()
        self._works = []
        mine = _signed(self._word)
        words = self._room.view(torch.int64)[:, 0].tolist()
        words[self._rank] = mine
        if words.count(mine) != len(words):
            # Ranks that agree may have filled their places with each other's parts already.
            raise mismatch([word % (1 << 64) for word in words], "No tensor holds anything of another call")

    def received(self, mine: Tensor) -> list[Tensor]:
        """What came from each rank, flat, like `mine`, which stands in this rank's place."""
        found = list(self._room[:, _HEAD : _HEAD + mine.nbytes].view(mine.dtype).unbind())
        found[self._rank] = mine.view(-1)
        return found


class Compared:
    """A collective under way: compared, received, put in place."""

    def __init__(
        self, opening: Opening, after: Sequence[Callable[[], object]], works: Sequence[Work] = ()
    ) -> None:
        self._opening: Opening | None = opening
        self._after = after
        self._works = works

    def wait(self) -> None:
        """Return when the results are there; raise what went wrong otherwise."""
        if self._opening is None:
            return
        self._opening.wait()
        for work in self._works:
            work.wait()
        for step in self._after:
            step()
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


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
