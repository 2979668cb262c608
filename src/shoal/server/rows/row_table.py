"""The rows that a shard holds in memory: values, optimizer state and the step of the last gradient, by id.

Slots are dense: row number `count` is the next one to come, and when rows leave, the last ones move into their
places. So the state is a few plain matrices, and the same operations give the same matrices on every server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.server.rows.growing_matrix import GrowingMatrix
from shoal.server.rows.row_optimizers import STEP
from shoal.server.rows.row_packing import RowLayout
from shoal.server.rows.slot_map import ABSENT, Ids, Slots

ID, CLOCK, VALUES = "id", "clock", "values"
_LOOK = 1024
"""How many candidates are looked at together, at least."""


class RowTable:
    """Rows of `dim` numbers with state, and the least recently used ones leave beyond `capacity` (0: none leave)."""

    def __init__(self, dim: int, dtype: torch.dtype, state: Sequence[str], capacity: int) -> None:
        whole = {ID: (torch.int64, 1), CLOCK: (torch.int64, 1), STEP: (torch.int32, 1)}
        shapes = {**whole, VALUES: (dtype, dim), **{f"state.{name}": (dtype, dim) for name in state}}
        self.state = {name: f"state.{name}" for name in state}
        self.columns = {name: GrowingMatrix(kind, width) for name, (kind, width) in shapes.items()}
        self.capacity = capacity
        self.now = 0
        """The highest step that has touched a row."""
        self.evicted = 0
        self._slots = Slots()
        self._order: Ids | None = None
        """Slots by id, while somebody goes through all rows."""
        self._waiting: Ids = np.zeros(0, dtype=np.int64)
        self._clocks: Ids = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.columns[ID])

    @property
    def layout(self) -> RowLayout:
        return [(name, column.dtype, column.width) for name, column in self.columns.items()]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return self._slots.nbytes + sum(column.nbytes for column in self.columns.values())

    def find(self, ids: Ids) -> Ids:
        """The slot of each id, or ABSENT."""
        return self._slots.find(ids)

    def enter(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of these ids, unique, and which of them are new; a new row is all zeros but for its id."""
        slots = self._slots.find(ids)
        new = slots == ABSENT
        count = len(self)
        fresh = ids[new]
        if fresh.size:
            slots[new] = np.arange(count, count + fresh.size)
            self._resize(count + fresh.size)
            self.columns[ID].array[count:] = fresh
            self._slots.add(fresh, slots[new])
        return torch.from_numpy(slots), torch.from_numpy(new)

    def touch(self, slots: torch.Tensor, clock: int) -> None:
        """These rows have a gradient now. Steps may come late, but the table's own time does not go back."""
        self.now = max(self.now, clock)
        self.columns[CLOCK].tensor[slots] = self.now
        self.columns[STEP].tensor[slots] += 1

    def evict(self) -> None:
        """Let the least recently used rows beyond the capacity go; of equally old ones, those with the lowest ids."""
        extra = len(self) - self.capacity if self.capacity else 0
        leaving: list[Ids] = []
        while extra > 0:
            if not self._waiting.size:
                self._find_candidates(extra, leaving)
            ids = self._waiting[: max(extra, _LOOK)]
            clocks = self._clocks[: max(extra, _LOOK)]
            slots = self._slots.find(ids)
            # One that has been used since, or has gone and come back, has a later clock than it had.
            still = np.flatnonzero((slots != ABSENT) & (self.columns[CLOCK].array[slots] == clocks))[:extra]
            seen = int(still[-1]) + 1 if still.size == extra else ids.size
            self._waiting = self._waiting[seen:]
            self._clocks = self._clocks[seen:]
            leaving.append(ids[still])
            extra -= still.size
        if leaving:
            # All at once: which rows move into the gaps must not depend on how many candidates were at hand, because
            # a server that has joined from a snapshot has none, and its matrices must stay those of the others.
            gone = np.concatenate(leaving)
            self._remove(gone, self._slots.find(gone))
            self.evicted += gone.size

    def load(self, columns: Sequence[torch.Tensor]) -> None:
        """Rows with everything that belongs to them, as `layout` says, in place of those with the same ids."""
        slots, _ = self.enter(np.ascontiguousarray(columns[0].view(-1).numpy()))
        for column, tensor in zip(self.columns.values(), columns, strict=True):
            column.put(slots, tensor)
        if len(slots):
            self.now = max(self.now, int(self.columns[CLOCK].take(slots).max()))
        self._waiting = self._clocks = np.zeros(0, dtype=np.int64)

    def after(self, last: int, limit: int) -> torch.Tensor:
        """The slots of the next rows by id, at most `limit`."""
        ids = self.columns[ID].array
        if self._order is None:
            self._order = np.argsort(ids)
        start = int(np.searchsorted(ids, last, side="right", sorter=self._order))
        found = self._order[start : start + limit].copy()
        if start + limit >= len(self):
            self._order = None
        return torch.from_numpy(found)

    def _find_candidates(self, extra: int, leaving: Sequence[Ids]) -> None:
        """Sort a share of the rows by age at once; it lasts for many evictions, as they can only get younger."""
        clock = self.columns[CLOCK].array
        ids = self.columns[ID].array
        stays = np.ones(len(self), dtype=np.bool_)
        for gone in leaving:
            # They leave at the end of this eviction, and must not be chosen twice.
            stays[self._slots.find(gone)] = False
        # Rows of the present step last: they are the ones in use.
        old = np.flatnonzero(stays & (clock < self.now))
        all_alike = not old.size
        if all_alike:
            old = np.flatnonzero(stays)
        # A partial sort of a sixteenth: finding candidates costs a pass over all rows, so one pass has to last.
        wanted = max(extra, old.size // 16)
        if wanted < old.size:
            old = old[clock[old] <= np.partition(clock[old], wanted - 1)[wanted - 1]]
        old = old[np.lexsort((ids[old], clock[old]))]
        if all_alike:  # another row may still get the same age and a lower id
            old = old[:extra]
        self._waiting = ids[old]
        self._clocks = clock[old]

    def _remove(self, ids: Ids, slots: Ids) -> None:
        count = len(self) - ids.size
        self._slots.remove(ids)
        places = torch.from_numpy(np.sort(slots[slots < count]))
        # Rows from the end fill the gaps: columns stay dense, and a removal costs what it removes.
        moved = torch.from_numpy(np.setdiff1d(np.arange(count, len(self)), slots, assume_unique=True))
        if len(moved):
            self._slots.move(self.columns[ID].array[moved.numpy()], places.numpy())
            for column in self.columns.values():
                column.put(places, column.take(moved))
        self._resize(count)

    def _resize(self, count: int) -> None:
        self._order = None
        for column in self.columns.values():
            column.resize(count)
