"""Gradients of rows that wait for their update, part by part, and which parts are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from shoal.server.protocol.state_machine import Refused
from shoal.server.rows.row_packing import cut
from shoal.server.rows.slot_map import Ids

_LATE = 8
"""Norms of so many steps before the floor are remembered: a slow worker may still ask for them."""


@dataclass(frozen=True)
class RowGradient:
    """Ids in ascending order, and a row for each."""

    ids: Ids
    rows: torch.Tensor

    def squares(self) -> float:
        """Σ g²."""
        norm = float(torch.linalg.vector_norm(self.rows))
        return norm * norm  # not ** 2, which raises where the product is infinite


class RowPartsState(TypedDict):
    """A snapshot, beside ids and rows of what is staged."""

    floor: int
    reached: int
    norms: list[tuple[int, float | None]]
    done: list[tuple[int, list[int]]]
    """(step, its parts that are over)"""
    staged: list[tuple[int, int, int]]
    """(step, part, number of rows)"""


class RowParts:
    """Staged gradients and finished parts, by step and part."""

    def __init__(self, dim: int, dtype: torch.dtype, start: int = 0) -> None:
        self._dim = dim
        self._dtype = dtype
        self._staged: dict[tuple[int, int], RowGradient] = {}
        self._done: dict[int, set[int]] = {}
        """Parts that are applied or dropped, by step, from the floor on."""
        self.norms: dict[int, float | None] = {}
        """By step: the norm that its update was made with, for workers that come to it later."""
        self._floor = start
        """Everything before this step is over."""
        self.reached = start
        """Every step before this one is over, where steps are applied one after the other."""

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def begun(self) -> bool:
        """Whether a gradient has come."""
        return bool(self._staged or self._done)

    def is_over(self, step: int, part: int) -> bool:
        return step < self._floor or part in self._done.get(step, ())

    def has(self, step: int, part: int) -> bool:
        return (step, part) in self._staged

    def stage(self, step: int, part: int, ids: Ids, rows: torch.Tensor) -> None:
        """Keep a copy of a part that is not there yet."""
        order = np.argsort(ids, kind="stable")
        self._staged[step, part] = RowGradient(ids[order], rows.index_select(0, torch.from_numpy(order)))

    def sum(self, step: int, parts: Sequence[int]) -> RowGradient:
        """The gradient of these parts, added up in order; of a single part, what is staged itself."""
        missing = [part for part in parts if (step, part) not in self._staged]
        if missing:
            raise Refused(f"part {missing[0]} of step {step} is not staged here; stage it before its update.")
        staged = [self._staged[step, part] for part in sorted(parts)]
        if len(staged) == 1:
            return staged[0]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *(one.ids for one in staged)])
        ids.sort(kind="stable")  # merges stretches that are in order
        first = np.ones(ids.size, dtype=bool)
        first[1:] = ids[1:] != ids[:-1]
        ids = ids[first]
        total = torch.zeros(ids.size, self._dim, dtype=self._dtype)
        for one in staged:
            places = torch.from_numpy(np.searchsorted(ids, one.ids))
            # Ids are unique within a part, so each place is read and written once.
            total.index_copy_(0, places, total.index_select(0, places).add_(one.rows))
        return RowGradient(ids, total)

    def look(self, step: int, parts: Sequence[int]) -> RowGradient | None:
        """As `sum`, for a question, which may overtake the parts it is about: None if one is still to come."""
        coming = any(not self.has(step, part) and not self.is_over(step, part) for part in parts)
        return None if coming else self.sum(step, parts)

    def finish(self, step: int, parts: Sequence[int], floor: int, norm: float | None = None) -> None:
        """Remember parts as done, and forget whatever is about steps before the floor."""
        self._floor = max(self._floor, floor)
        self.reached = max(self.reached, step + 1, self._floor)
        self.norms[step] = norm
        self.norms = {at: one for at, one in self.norms.items() if at >= self._floor - _LATE}
        self._done.setdefault(step, set()).update(parts)
        self._done = {at: done for at, done in self._done.items() if at >= self._floor}
        self._staged = {at: one for at, one in self._staged.items() if not self.is_over(*at)}

    def snapshot(self) -> tuple[RowPartsState, list[torch.Tensor]]:
        """All of it: a plain value, and tensors."""
        value: RowPartsState = {
            "floor": self._floor,
            "reached": self.reached,
            "norms": list(self.norms.items()),
            "done": [(step, sorted(parts)) for step, parts in sorted(self._done.items())],
            "staged": [(step, part, one.ids.size) for (step, part), one in self._staged.items()],
        }
        pairs = [(torch.from_numpy(one.ids), one.rows) for one in self._staged.values()]
        return value, [tensor for pair in pairs for tensor in pair]

    def restore(self, value: RowPartsState, packed: torch.Tensor) -> None:
        """Become what `snapshot` gave, its tensors joined."""
        self._floor = value["floor"]
        self.reached = value["reached"]
        self._done = {step: set(parts) for step, parts in value["done"]}
        self.norms = dict(value["norms"])
        kinds = [((n, torch.int64), (n * self._dim, self._dtype)) for _, _, n in value["staged"]]
        tensors = iter(cut(packed, [kind for pair in kinds for kind in pair]))
        self._staged = {
            (step, part): RowGradient(next(tensors).numpy().copy(), next(tensors).view(n, self._dim).clone())
            for step, part, n in value["staged"]
        }
