"""Send each matrix as a product of two thin ones, found by one step of power iteration per turn.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019.
When to use: large matrices on a slow network. Payloads are summed, so it does not matter how many workers there are.
Two rounds instead of one: where latency counts more than bytes it does not pay. Exchanges that cut parameters into
slices have no matrices to offer: each slice is then treated as one square, which approximates worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.none import Verbatim
from shoal.errors import ConfigError
from shoal.seeds import derive

Matrix = tuple[int, int, int]


@dataclass(frozen=True)
class PowerSgd(Compressor):
    """Matrices travel at `rank`, if that is less; everything else travels as it is, in the same payload."""

    summary: ClassVar[str] = "each matrix as a product of two thin ones"
    bound: ClassVar[float] = 0.1
    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"powersgd({self.rank}) would leave nothing of a matrix; give a rank of 1 or more, as in powersgd(4)."
            )

    def code(self, layout: Layout) -> Code:
        matrices = worthwhile(layout, self.rank)
        return Factors(layout, matrices, self.rank) if matrices else Verbatim(layout)


def worthwhile(layout: Layout, rank: int) -> tuple[Matrix, ...]:
    """The matrices whose two factors are smaller than they; without any named, the vector as one square.

    >>> worthwhile(Layout(130, torch.float32, torch.device("cpu"), ((0, 10, 10), (110, 4, 5))), rank=4)
    ((0, 10, 10),)
    >>> worthwhile(Layout(130, torch.float32, torch.device("cpu")), rank=4)
    ((0, 11, 11),)
    """
    side = math.isqrt(layout.size)
    square = ((0, side, layout.size // side if side else 0),)
    matrices = square if layout.matrices is None else layout.matrices
    return tuple(m for m in matrices if rank * (m[1] + m[2]) < m[1] * m[2])


class Factors(Code):
    """M ≈ P Qᵀ for each matrix M. First payload: M Q of all matrices, then all else as it is. Second: Mᵀ P.

    Both lie in memory with their columns as rows: torch multiplies them several times as fast that way.
    P is the sum of the first payloads with its columns made orthonormal; Q stays for the next turn. Both are the same
    on all workers if these compute alike. Thin matrices are float32, or what the vector is if that is wider.
    """

    summable = True
    elementwise = False
    rounds = 2

    def __init__(self, layout: Layout, matrices: tuple[Matrix, ...], rank: int) -> None:
        super().__init__(layout)
        self._matrices = matrices
        self._rank = rank
        self._dtype = torch.promote_types(layout.dtype, torch.float32)
        self._rest = between(layout.size, matrices)
        self._tall = rank * sum(rows for _, rows, _ in matrices)
        self._wide = rank * sum(columns for _, _, columns in matrices)
        self._raw = sum(stop - start for start, stop in self._rest)
        self._q: torch.Tensor | None = None
        nothing = torch.empty(0, dtype=self._dtype, device=layout.device)
        self._p = self._sent = self._mine = nothing
        """Of this turn: the first payload's sum, orthonormal; the sum of all else; this worker's own Mᵀ P."""

    def payload(self) -> torch.Tensor:
        return torch.zeros(self._tall + self._raw, dtype=self._dtype, device=self.layout.device)

    def nbytes(self) -> int:
        return sum(self.sizes())

    def sizes(self) -> tuple[int, ...]:
        return (self._tall + self._raw) * self._dtype.itemsize, self._wide * self._dtype.itemsize

    def kept(self, feedback: bool) -> int:
        del feedback
        return (
            2 * self._wide + self._tall + self._raw
        ) * self._dtype.itemsize  # Q, own Mᵀ P, P, and all else

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        del turn
        factors = zip(self._views(vector), self._tall_of(out), self._wide_of(self._warm()), strict=True)
        for matrix, p, q in factors:
            torch.mm(q, matrix.to(self._dtype).T, out=p)
        at = self._tall
        for start, stop in self._rest:
            out[at : at + stop - start].copy_(vector[start:stop])
            at += stop - start

    def second(self, vector: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        self._p = summed[: self._tall].clone()
        self._sent = summed[self._tall :].clone()
        self._mine = torch.empty(self._wide, dtype=self._dtype, device=self.layout.device)
        factors = zip(self._views(vector), self._tall_of(self._p), self._wide_of(self._mine), strict=True)
        for matrix, p, q in factors:
            make_orthonormal(p)
            torch.mm(p, matrix.to(self._dtype), out=q)
        return self._mine.clone()

    def decode(self, payload: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        super().decode(payload, out, add)
        for q, new in zip(self._wide_of(self._warm()), self._wide_of(payload), strict=True):
            if not new.is_cpu:  # the same without a look, for which the host would wait
                size = new.norm()
                good = (size > 0).logical_and_(size.isfinite())
                make_orthonormal(q.copy_(torch.where(good, new, q)))
                continue
            size = float(new.norm())
            if 0 < size < math.inf:  # else nothing can be learnt from it, and the old one is as good as any
                make_orthonormal(q.copy_(new))

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        factors = zip(self._views(out), self._tall_of(self._p), self._wide_of(payload), strict=True)
        for matrix, p, q in factors:
            _put(matrix, p, q, factor)
        at = 0
        for start, stop in self._rest:
            said = self._sent[at : at + stop - start]
            if factor is None:
                out[start:stop].copy_(said)
            else:
                out[start:stop].add_(said, alpha=factor)
            at += stop - start

    def lose(self, kept: torch.Tensor, payload: torch.Tensor, among: int) -> None:
        """Take away this worker's own part of the sum, P (Mᵀ P)ᵀ: those of all workers are the sum."""
        del payload, among
        factors = zip(self._views(kept), self._tall_of(self._p), self._wide_of(self._mine), strict=True)
        for matrix, p, q in factors:
            _put(matrix, p, q, -1.0)
        for start, stop in self._rest:
            kept[start:stop].zero_()

    def state(self) -> dict[str, torch.Tensor]:
        return {"q": self._warm().clone()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        if set(state) != {"q"} or state["q"].numel() != self._wide:
            raise ValueError(f"powersgd needs a q of {self._wide} values, but was given {sorted(state)}")
        self._warm().copy_(state["q"])

    def _warm(self) -> torch.Tensor:
        """Q: at first random, the same on all workers."""
        if self._q is None:
            generator = torch.Generator().manual_seed(derive(0, "powersgd"))
            drawn = torch.randn(self._wide, generator=generator, dtype=self._dtype, device="cpu")
            self._q = drawn.to(self.layout.device)
            for q in self._wide_of(self._q):
                make_orthonormal(q)
        return self._q

    def _views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [vector[start : start + r * c].view(r, c) for start, r, c in self._matrices]

    def _tall_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self._rank * rows for _, rows, _ in self._matrices]
        return [each.view(self._rank, -1) for each in torch.split(flat[: self._tall], sizes)]

    def _wide_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self._rank * columns for _, _, columns in self._matrices]
        return [each.view(self._rank, -1) for each in torch.split(flat, sizes)]


def _put(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor, factor: float | None) -> None:
    """matrix += factor × pᵀ q; None: matrix = pᵀ q."""
    if matrix.dtype != p.dtype:
        said = p.T @ q
        matrix.copy_(said) if factor is None else matrix.add_(said, alpha=factor)
    elif factor is None:
        torch.mm(p.T, q, out=matrix)
    else:
        matrix.addmm_(p.T, q, alpha=factor)


def make_orthonormal(rows: torch.Tensor) -> None:
    """Let a few long rows be orthonormal and span what they spanned, in place.

    >>> rows = torch.tensor([[3.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    >>> make_orthonormal(rows)
    >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-6)
    True
    """
    rows.copy_(torch.linalg.qr(rows.T).Q.T)


def between(size: int, matrices: tuple[Matrix, ...]) -> tuple[tuple[int, int], ...]:
    """Start and stop of what lies outside of all matrices, which are in order.

    >>> between(10, ((1, 2, 2), (5, 1, 3)))
    ((0, 1), (8, 10))
    """
    ends = [0, *(start + rows * columns for start, rows, columns in matrices)]
    starts = [*(start for start, _, _ in matrices), size]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
