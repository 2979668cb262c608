"""Gradients of parts that wait for their update.

The sum of a step is taken in the order of parts, ((g0 + g1) + g2), so that it has the same bits whoever was first.
Where parts may be added up as they come, one that comes in its turn goes into the step's one vector at once; one that
comes early waits in a vector of its own. So in the good case a step takes one vector, and each part one pass over
memory.

A part may come in several micro-batches. The parts of each are summed first, then the micro-batches in their order, as
exchanges do that reduce after each one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from shoal.aggregate.base import Aggregate
from shoal.world.shm.memory import put


class Pool:
    """Vectors of one size and type. Those given back are handed out again: steps in a row take no new memory."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self.dtype = dtype
        self._free: list[torch.Tensor] = []

    def empty(self) -> torch.Tensor:
        """A vector with anything in it."""
        return self._free.pop() if self._free else torch.empty(self.size, dtype=self.dtype)

    def copy_of(self, source: torch.Tensor) -> torch.Tensor:
        """A vector with the same numbers; `source` may have another type."""
        vector = self.empty()
        put(vector, source)
        return vector

    def give_back(self, vector: torch.Tensor) -> None:
        self._free.append(vector)


@dataclass
class Micro:
    """What has come of one micro-batch of a step."""

    summed: int = 0
    """Parts 0 to this, exclusively, are in `total`."""
    total: torch.Tensor | None = None
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def has(self, part: int) -> bool:
        return part < self.summed or part in self.waiting

    def parts(self) -> list[int]:
        return [*range(self.summed), *sorted(self.waiting)]

    def vectors(self, parts: Sequence[int]) -> list[torch.Tensor]:
        """What adds up to the sum of these parts, in order. `parts` are sorted, with all of `total` or none."""
        head = [self.total] if self.total is not None and 0 in parts else []
        return head + [self.waiting[part] for part in parts if part in self.waiting]


class Staged:
    """Everything staged, by step, then by micro-batch."""

    def __init__(self, size: int, dtype: torch.dtype, aggregate: Aggregate, hold: bool) -> None:
        self.pool = Pool(size, dtype)
        self.aggregate = aggregate
        self.hold = hold or not aggregate.sums
        """Parts stay apart until their update: some of a step's may be updated alone, or they are not summed."""
        self.steps: dict[int, dict[int, Micro]] = {}

    def has(self, step: int, part: int, micro: int | None = None) -> bool:
        """Whether a part is there; without `micro`, any micro-batch of it."""
        found = self.steps.get(step, {})
        micros = found.values() if micro is None else [found[micro]] if micro in found else []
        return any(m.has(part) for m in micros)

    def parts(self, step: int) -> set[int]:
        """Which parts of a step are there."""
        return {part for micro in self.steps.get(step, {}).values() for part in micro.parts()}

    def inseparable(self, step: int, parts: Iterable[int]) -> list[int]:
        """Parts that are not named but are in one sum with some that are."""
        most = max((micro.summed for micro in self.steps.get(step, {}).values()), default=0)
        named = set(parts)
        summed = set(range(most))
        return sorted(summed - named) if summed & named else []

    def add(self, step: int, part: int, micro: int, gradient: torch.Tensor) -> None:
        """Take in a part that is not there yet."""
        place = self.steps.setdefault(step, {}).setdefault(micro, Micro())
        # Floating-point sums depend on order. Parts are added in order of their numbers, whenever they come, so that a
        # run has the same bits each time.
        if self.hold or part != place.summed:
            place.waiting[part] = self.pool.copy_of(gradient)
            return
        if place.total is None:
            place.total = self.pool.copy_of(gradient)
        else:
            place.total.add_(gradient)
        place.summed += 1
        while place.summed in place.waiting:
            early = place.waiting.pop(place.summed)
            place.total.add_(early)
            self.pool.give_back(early)
            place.summed += 1

    def forget(self, step: int, parts: Sequence[int]) -> None:
        """Let these parts go. Those that are in one sum go together."""
        for vector in self._remove(step, parts):
            self.pool.give_back(vector)

    def forget_below(self, floor: int) -> None:
        """Let all steps before this one go."""
        for step in [step for step in self.steps if step < floor]:
            self.forget(step, sorted(self.parts(step)))

    def look(self, step: int, parts: Sequence[int], counts: Sequence[float]) -> tuple[torch.Tensor, bool]:
        """The gradient of these parts, which stay. True: it is a vector of its own, to give back to the pool."""
        return self._combine(step, parts, counts, mine=False)

    def take(self, step: int, parts: Sequence[int], counts: Sequence[float]) -> torch.Tensor:
        """The gradient of these parts, which go; it is made in their own memory where that can be."""
        gradient, _ = self._combine(step, parts, counts, mine=True)
        self._remove(step, parts)  # their vectors are in the pool by now, or are the gradient
        return gradient

    def _remove(self, step: int, parts: Sequence[int]) -> list[torch.Tensor]:
        micros = self.steps.get(step, {})
        found = []
        for number, micro in list(micros.items()):
            if micro.total is not None and 0 in parts:
                found.append(micro.total)
                micro.total = None
                micro.summed = 0
            found += [micro.waiting.pop(part) for part in parts if part in micro.waiting]
            if micro.total is None and not micro.waiting:
                del micros[number]
        if not micros:
            self.steps.pop(step, None)
        return found

    def _combine(
        self, step: int, parts: Sequence[int], counts: Sequence[float], mine: bool
    ) -> tuple[torch.Tensor, bool]:
        micros = [micro for _, micro in sorted(self.steps.get(step, {}).items())]
        if self.aggregate.sums:
            sums = [self._sum(vectors, mine) for micro in micros if (vectors := micro.vectors(parts))]
            return self._sum_of(sums)
        # Median and its like compare parts: micro-batches of one part are summed first.
        whole = [self._sum([m.waiting[part] for m in micros if part in m.waiting], mine) for part in parts]
        out = self.pool.empty()
        self.aggregate.combine([vector for vector, _ in whole], counts, out)
        self._give_back(whole)
        return out, True

    def _sum(self, vectors: Sequence[torch.Tensor], mine: bool) -> tuple[torch.Tensor, bool]:
        return self._sum_of([(vector, mine) for vector in vectors])

    def _sum_of(self, vectors: Sequence[tuple[torch.Tensor, bool]]) -> tuple[torch.Tensor, bool]:
        """Add up in order, into the first if that may be written. True: the result may be."""
        if not vectors:
            return self.pool.empty().zero_(), True
        (total, mine), *rest = vectors
        # Whoever only looks must leave the staged vectors as they are: the update may still come with other parts.
        if rest and not mine:
            total = self.pool.copy_of(total)
            mine = True
        for vector, _ in rest:
            total.add_(vector)
        self._give_back(rest)
        return total, mine

    def _give_back(self, vectors: Iterable[tuple[torch.Tensor, bool]]) -> None:
        for vector, mine in vectors:
            if mine:
                self.pool.give_back(vector)
