"""Vectors that travel in a floating type, element by element: what `none`, `fp16` and `bf16` have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.compress.base import Code, Layout

CHUNK = 1 << 19
"""Elements that are worked on at a time: few enough that what one pass leaves in cache the next one finds there, and so
many that the passes take longer than their calls."""


class Cast(Code):
    """The payload is the vector in a type of its own. Rounds to nearest; sums are made in that type too."""

    summable = True
    elementwise = True

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__(layout)
        self.dtype = dtype
        self._scratch: torch.Tensor | None = None

    def payload(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=self.dtype, device=self.layout.device)

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        del turn
        out.copy_(vector)

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        if factor is None:
            out.copy_(payload)
            return
        # torch adds tensors of two types nine times as slowly as it converts one of them.
        if self._scratch is None:
            self._scratch = torch.empty(CHUNK, dtype=out.dtype, device=out.device)
        for start, stop in chunks(out.numel()):
            wide = self._scratch[: stop - start].copy_(payload[start:stop])
            out[start:stop].add_(wide, alpha=factor)

    def nbytes(self) -> int:
        return self.layout.size * self.dtype.itemsize

    def kept(self, feedback: bool) -> int:
        return CHUNK * self.layout.dtype.itemsize if feedback else 0


def chunks(size: int, step: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Start and stop of each stretch of a vector.

    >>> list(chunks(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    for start in range(0, size, step):
        yield start, min(start + step, size)
