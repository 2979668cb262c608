"""Which slot a row has: a map from ids to small numbers, for tens of millions of ids and whole batches at a time.

Open addressing in two plain arrays: 12 bytes a place, 20 to 40 bytes a row. A batch is looked up in rounds: all
ids look at their first place at once, those that met another id look at the next one, and so on; rounds become
short quickly because the table stays at most 3/5 full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.partition.hashes import mix

Ids = npt.NDArray[np.int64]

ABSENT = -1
_EMPTY = -1
_LEFT = -2
"""Somebody was here: a search goes on past it, a new id may move in."""
_SMALLEST = 1 << 10
_OWN = np.uint64(0x2545F4914F6CDD1D)
"""Ids come here by their hash. A hash of something else keeps those of one shard from meeting in few places."""


class Slots:
    """A map from ids (0 and more) to slots. Where a method takes ids, they are unique."""

    def __init__(self) -> None:
        self._clear(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes

    def find(self, ids: Ids) -> Ids:
        """The slot of each id, or ABSENT. Here an id may occur twice."""
        places = self._search(ids)
        found = self._slots[places].astype(np.int64)  # place -1 is some place, whose answer is not used
        found[places < 0] = ABSENT
        return found

    def add(self, ids: Ids, slots: Ids) -> None:
        """Map ids that are not in the map yet."""
        # At most 60 % full; places that were left count, since searches run through them.
        if 5 * (self._used + ids.size) > 3 * self._keys.size:
            self._grow(self._count + ids.size)
        self._insert(ids, slots.astype(np.uint32))
        self._count += ids.size

    def move(self, ids: Ids, slots: Ids) -> None:
        """Give ids that are in the map other slots."""
        self._slots[self._search(ids)] = slots

    def remove(self, ids: Ids) -> None:
        """Forget ids that are in the map."""
        self._keys[self._search(ids)] = _LEFT
        self._count -= ids.size

    def _clear(self, size: int) -> None:
        self._keys = np.full(size, _EMPTY, dtype=np.int64)
        self._slots = np.zeros(size, dtype=np.uint32)
        self._count = self._used = 0  # used: places that are not empty, taken or left

    def _home(self, ids: Ids) -> Ids:
        return (mix(ids.view(np.uint64) ^ _OWN) & np.uint64(self._keys.size - 1)).view(np.int64)

    def _search(self, ids: Ids) -> Ids:
        """The place of each id, or -1."""
        mask = self._keys.size - 1
        places = self._home(ids)
        seen = self._keys[places]
        places[seen == _EMPTY] = -1
        # Linear probing, for all ids at once: in each round only those that have met another id go on.
        asking = np.flatnonzero((seen != ids) & (seen != _EMPTY))
        wanted = ids[asking]
        at = places[asking]
        while asking.size:
            at = (at + 1) & mask
            seen = self._keys[at]
            places[asking] = np.where(seen == wanted, at, -1)
            on = np.flatnonzero((seen != wanted) & (seen != _EMPTY))
            asking = asking[on]
            wanted = wanted[on]
            at = at[on]
        return places

    def _insert(self, ids: Ids, slots: npt.NDArray[np.uint32]) -> None:
        mask = self._keys.size - 1
        at = self._home(ids)
        while ids.size:
            seen = self._keys[at]
            free = np.flatnonzero(seen < 0)
            # Several may write to one place; whoever finds itself there afterwards has it.
            self._keys[at[free]] = ids[free]
            has = self._keys[at] == ids
            self._used += int(np.count_nonzero(has & (seen == _EMPTY)))
            self._slots[at[has]] = slots[has]
            on = np.flatnonzero(~has)
            ids = ids[on]
            slots = slots[on]
            at = (at[on] + 1) & mask

    def _grow(self, count: int) -> None:
        """Build the map anew, large enough for so many ids; this also forgets who left."""
        held = np.flatnonzero(self._keys >= 0)
        ids = self._keys[held]
        slots = self._slots[held]
        size = _SMALLEST
        while 5 * count > 2 * size:  # leave room: the next time must be far off
            size *= 2
        self._clear(size)
        for start in range(0, ids.size, 1 << 16):  # in pieces that stay in the cache
            self._insert(ids[start : start + (1 << 16)], slots[start : start + (1 << 16)])
        self._count = ids.size
