"""Send only the elements with the largest absolute values, with their places.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin et al., "Deep Gradient
Compression", ICLR 2018, where the threshold comes from a sample.
When to use: slow networks and few workers, `topk(0.01)` sends a fiftieth of the bytes. Payloads are gathered, so what
each worker receives grows with their number. What is left out waits in the error feedback, sometimes for many steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout, aligned, check_ratio, part
from shoal.compress.cast import CHUNK, chunks
from shoal.seeds import derive

SMALL = 1 << 15
"""Vectors up to this length are ranked as a whole."""
SAMPLED = 600
"""So many elements of a sample should be above the threshold: it then lets through what is wanted to some 4 %."""
SURPLUS = 3.0
"""By how many standard deviations more than wanted the threshold should let through: what is too much is ranked."""
ENOUGH = 0.9
"""A payload that is full to this share may leave; below it the sample was misleading and the whole vector is ranked."""


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest `ratio` of the elements travel exactly; of large vectors, nearly the largest."""

    summary: ClassVar[str] = "only the largest elements, with their places"
    bound: ClassVar[float] = 0.15
    ratio: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio("topk", self.ratio)

    def code(self, layout: Layout) -> Code:
        return Largest(layout, self.ratio)


class Largest(Code):
    """The payload: k places, then k values. Places that are not needed repeat the first one, with the value 0."""

    summable = False
    elementwise = False

    def __init__(self, layout: Layout, ratio: float) -> None:
        super().__init__(layout)
        self._ratio = ratio
        self._count = how_many(layout.size, ratio)
        self._places = torch.int32 if layout.size <= 1 << 31 else torch.int64
        self._begin = aligned(self._count * self._places.itemsize)
        self._sizes: torch.Tensor | None = None
        self._small: torch.Tensor | None = None

    def payload(self) -> torch.Tensor:
        return torch.zeros(self.nbytes(), dtype=torch.uint8, device=self.layout.device)

    def nbytes(self) -> int:
        return self._begin + aligned(self._count * self.layout.dtype.itemsize)

    def kept(self, feedback: bool) -> int:
        del feedback
        ranked = self._count == self.layout.size or self.layout.size <= SMALL
        return 0 if ranked else CHUNK * (self.layout.dtype.itemsize + 1)

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        out.zero_()
        if not self._count:
            return
        chosen = self._choose(vector, turn)
        places, values = self._parts(out)
        places[: len(chosen)].copy_(chosen)
        places[len(chosen) :].fill_(places[0])
        torch.index_select(vector, 0, chosen, out=values[: len(chosen)])

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        places, values = self._parts(payload)
        if factor is None:
            out.zero_()
        out.index_add_(0, places, values, alpha=1.0 if factor is None else factor)

    def lose(self, kept: torch.Tensor, payload: torch.Tensor, among: int) -> None:
        del among
        kept.index_fill_(0, self._parts(payload)[0].long(), 0.0)

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = part(payload, 0, self._count, self._places)
        return places, part(payload, self._begin, self._count, self.layout.dtype)

    def _choose(self, vector: torch.Tensor, turn: int) -> torch.Tensor:
        """The places of the k largest elements; fewer if the others are 0, or if the sample was a little too high."""
        if self._count == len(vector):
            return torch.arange(len(vector), device=vector.device)
        # A threshold lets through as many as it does: on a card the host would wait to know how many.
        if len(vector) <= SMALL or not vector.is_cpu:
            return self._rank(vector)
        threshold = self._threshold(vector, turn)
        chosen = self._above(vector, threshold)
        surplus = len(chosen) - self._count
        if surplus > 0:
            sizes = vector.index_select(0, chosen).abs_()
            keep = torch.ones(len(chosen), dtype=torch.bool, device=vector.device)
            keep[sizes.topk(surplus, largest=False, sorted=False).indices] = False
            return chosen[keep]
        if threshold > 0 and len(chosen) < ENOUGH * self._count:
            return self._rank(vector)
        return chosen

    def _rank(self, vector: torch.Tensor) -> torch.Tensor:
        """Undefined values count as the largest."""
        return vector.abs().topk(self._count, sorted=False).indices.sort().values

    def _threshold(self, vector: torch.Tensor, turn: int) -> float:
        """A size that a little more than the wanted number of elements exceed, judged by a random sample of them."""
        number = min(len(vector) // 4, max(SMALL, int(SAMPLED / self._ratio)))
        generator = torch.Generator().manual_seed(derive(0, "topk", turn))
        drawn = torch.randint(len(vector), (number,), generator=generator, device="cpu")
        places = drawn.to(vector.device)
        sizes = vector.index_select(0, places).abs_()
        wanted = number * self._ratio
        above = min(number - 1, round(wanted + SURPLUS * wanted**0.5))
        return float(sizes.kthvalue(number - above).values)

    def _above(self, vector: torch.Tensor, threshold: float) -> torch.Tensor:
        """The places of all elements whose size exceeds the threshold or is undefined."""
        if self._sizes is None or self._small is None:
            self._sizes = torch.empty(CHUNK, dtype=vector.dtype, device=vector.device)
            self._small = torch.empty(CHUNK, dtype=torch.bool, device=vector.device)
        found = []
        for start, stop in chunks(len(vector)):
            sizes = self._sizes[: stop - start]
            small = self._small[: stop - start]
            torch.abs(vector[start:stop], out=sizes)
            torch.le(sizes, threshold, out=small)
            found.append(small.logical_not_().nonzero().view(-1).add_(start))
        return torch.cat(found)


def how_many(size: int, ratio: float) -> int:
    """How many elements travel: one at least.

    >>> how_many(1000, 0.01), how_many(7, 0.01), how_many(0, 0.5)
    (10, 1, 0)
    """
    return min(size, max(1, round(ratio * size)))
