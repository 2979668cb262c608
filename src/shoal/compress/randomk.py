"""Send a random choice of elements. All workers choose the same ones, so only values travel, and they can be summed.

Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
When to use: where topk is wanted but its payloads, which are gathered, are too many: an all-reduce costs the same
however many workers there are. It needs a larger ratio, as it does not look at what matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout, check_ratio
from shoal.compress.topk import how_many
from shoal.seeds import derive


@dataclass(frozen=True)
class RandomK(Compressor):
    """A random `ratio` of the elements travel exactly; without feedback, scaled so that their mean is right."""

    summary: ClassVar[str] = "a random choice of elements, the same on all workers"
    bound: ClassVar[float] = 0.5
    ratio: float = 0.1
    feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio("randomk", self.ratio)

    def code(self, layout: Layout) -> Code:
        return Drawn(layout, self.ratio, scaled=not self.feedback)


class Drawn(Code):
    """The payload: the values of the elements that (turn) draws."""

    summable = True
    elementwise = False

    def __init__(self, layout: Layout, ratio: float, scaled: bool) -> None:
        """`scaled`: values grow by as much as there are more elements than values, and their expectation is right.

        With feedback that would be wrong: what is left out is sent later anyway.
        """
        super().__init__(layout)
        self._count = how_many(layout.size, ratio)
        self._scale = layout.size / max(1, self._count) if scaled else 1.0
        self._turn: int | None = None
        self._ends: torch.Tensor | None = None
        self._places = torch.empty(0, dtype=torch.int64, device=layout.device)

    def payload(self) -> torch.Tensor:
        return torch.zeros(self._count, dtype=self.layout.dtype, device=self.layout.device)

    def nbytes(self) -> int:
        return self._count * self.layout.dtype.itemsize

    def kept(self, feedback: bool) -> int:
        del feedback
        return (2 * self._count + 1) * 8  # places, and the ends of the stretches that they are drawn from

    def turn_to(self, turn: int) -> None:
        """One element of each of k stretches of the vector, as seen from a random beginning.

        So no element comes twice, each has the same chance, and nothing has to be sorted or shuffled.
        """
        if turn == self._turn:
            return
        if self._ends is None:
            numbers = torch.arange(self._count + 1, device="cpu")
            self._ends = numbers * self.layout.size // max(1, self._count)
        generator = torch.Generator().manual_seed(derive(0, "randomk", turn))
        size = max(1, self.layout.size)
        begin = int(torch.randint(size, (1,), generator=generator, device="cpu"))
        # That the first of a stretch come a little more often, as 2⁶² is no multiple of its length, nobody can see.
        places = torch.randint(1 << 62, (self._count,), generator=generator, device="cpu")
        places.remainder_(self._ends.diff()).add_(self._ends[:-1]).add_(begin).remainder_(size)
        self._places = places.to(self.layout.device)
        self._turn = turn

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        self.turn_to(turn)
        torch.index_select(vector, 0, self._places, out=out)
        if self._scale != 1:
            out.mul_(self._scale)
        # What is not drawn would hide that a step has gone wrong. A sum is cheaper than a look at each, but overflows.
        if not vector.is_cpu:  # where the host would wait for a look
            out.masked_fill_(vector.isfinite().all().logical_not_(), torch.nan)
        elif not torch.isfinite(vector.sum()) and not vector.isfinite().all():
            out.fill_(torch.nan)

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        if factor is None:
            out.zero_()
            out.index_copy_(0, self._places, payload)
        else:
            out.index_add_(0, self._places, payload, alpha=factor)

    def lose(self, kept: torch.Tensor, payload: torch.Tensor, among: int) -> None:
        if self._scale == 1:
            kept.index_fill_(0, self._places, 0.0)
        else:
            super().lose(kept, payload, among)
