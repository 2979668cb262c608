"""The exchange with which a collective over gloo begins: the word of every rank's call, and small data behind it.

It is gloo's own all-to-all, on gloo's threads, and as long whatever is called. Messages of ours were slower: gloo's
thread for the sockets spins while the sender holds its lock, so where cores are few one takes a scheduler's slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shoal.torch_private import c10d
from shoal.world.shm.calls import SEQUENCE, mismatch

_ROOM = 4 << 10
"""Bytes behind the words that a rank sends in all, used or not: as good as free beside the journey itself."""
_HEAD = 16
"""Bytes of a word and what follows it, so that numbers of every type lie at a multiple of their size."""
_SEQUENCES = 4
_CALLS = 4096
"""Different large calls of which it is remembered how often they were made."""


def room_for(size: int) -> int:
    """Bytes of data to a rank that go behind the word, among so many ranks.

    >>> room_for(2), room_for(9)
    (4096, 512)
    """
    return _ROOM // (size - 1) // _HEAD * _HEAD


class _Places:
    """Where the words and data of an exchange lie, with all views that it needs."""

    def __init__(self, size: int) -> None:
        given, got = torch.zeros(2, size, _HEAD + room_for(size), dtype=torch.uint8, device="cpu").unbind()
        self.given = given.view(-1)
        self.got = got.view(-1)
        self.given_words = given.view(torch.int64)[:, 0]
        self.got_words = got.view(torch.int64)[:, 0]
        self.given_data = given[:, _HEAD:]
        self.got_data = got[:, _HEAD:]


class Openings:
    """Those of one group, in the order in which its collectives are called."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self._size = size
        self._calls = 0
        self._seen: dict[int, int] = {}
        # Used again: gloo's threads would wait for the interpreter to drop what we have dropped before them.
        self._free: list[_Places] = []

    def number(self, call: int) -> int:
        """The word of the next call."""
        self._calls += 1
        return call | (self._calls % _SEQUENCES) << SEQUENCE

    def due(self, call: int) -> bool:
        """Whether a large call is compared this time: the same on all ranks that have made the same calls so far."""
        if len(self._seen) >= _CALLS:
            self._seen.clear()
        count = self._seen[call] = self._seen.get(call, 0) + 1
        return count & (count - 1) == 0

    def open(self, word: int, parts: Sequence[Tensor] = ()) -> Opening:
        """Begin. `parts[r]`, as bytes, goes to rank r behind the word; without any, the word goes alone."""
        places = self._free.pop() if self._free else _Places(self._size)
        places.given_words.fill_(_signed(word))
        if parts:
            room = places.given_data[:, : parts[0].numel()]
            if parts[0] is parts[-1]:
                room.copy_(parts[0])  # to all the same
            else:
                for row, part in zip(room, parts, strict=True):
                    row.copy_(part)
        work = self._group.alltoall_base(places.got, places.given, [], [], c10d.AllToAllOptions())
        return Opening(self, word, places, work)

    def give_back(self, places: _Places) -> None:
        self._free.append(places)

    def forget(self) -> None:
        """Ranks have called different things: what follows is compared as if for the first time."""
        self._seen.clear()


class Opening:
    """One exchange under way."""

    def __init__(self, owner: Openings, word: int, places: _Places, work: Work) -> None:
        self._owner = owner
        self._word = word
        self._places = places
        self._work = work

    def wait(self) -> None:
        """All have come, to the same call; or raises `CollectiveMismatch`."""
        self._work.wait()
        mine = _signed(self._word)
        words = self._places.got_words.tolist()
        if words.count(mine) != len(words):
            self._owner.forget()
            # Ranks that agree may have filled their places with each other's parts already.
            raise mismatch([word % (1 << 64) for word in words], "No tensor holds anything of another call")

    def received(self, mine: Tensor) -> list[Tensor]:
        """What came from each rank, flat, like `mine`, which stands in this rank's place."""
        found = list(self._places.got_data[:, : mine.nbytes].view(mine.dtype).unbind())
        found[self._owner.rank] = mine.view(-1)
        return found

    def close(self) -> None:
        """Nobody looks at what was received any more."""
        self._owner.give_back(self._places)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
