"""How one bucket travels compressed, step after step: its codes and their residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.compress.base import Code
from shoal.compress.feedback import Feedback
from shoal.world.buckets import Bucket, gaps_of, pieces_of


@dataclass
class CompressedBucket:
    """How one bucket travels: a code for each of its equal parts, and their residuals."""

    bucket: Bucket
    codes: list[Code]
    feedbacks: list[Feedback | None]
    starts: list[int]
    """Where each slice of it begins in the bucket; a code may be for all of them."""
    width: int
    """Elements of a slice."""
    scattered: bool = False
    """Whether each worker gets the sum of its own slice only."""
    turn: int = 0
    payload: torch.Tensor | None = None

    def parts(self, feedback: Feedback) -> tuple[torch.Tensor, ...]:
        """The residuals, slice by slice."""
        return feedback.residual.chunk(len(self.starts) // len(self.codes))

    def __post_init__(self) -> None:
        self.gaps = [self._gaps_from(start) for start in self.starts]

    def clear(self, vectors: Sequence[torch.Tensor]) -> None:
        """Between parameters there is nothing, though a code may say something of it; one vector for each slice."""
        for vector, gaps in zip(vectors, self.gaps, strict=True):
            for start, stop in gaps:
                vector[start:stop].zero_()

    def keep(self) -> None:
        """The turn is over: what was not sent of gaps never was."""
        kept = [part for feedback in self.feedbacks if feedback is not None for part in self.parts(feedback)]
        if kept:
            self.clear(kept)

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        """The payloads of all parts, one after the other; the vector gets what was left over from earlier turns."""
        if self.payload is None:
            self.payload = torch.cat([code.payload() for code in self.codes])
        parts, payloads = vector.chunk(len(self.codes)), self.payload.chunk(len(self.codes))
        for code, feedback, part, payload in zip(self.codes, self.feedbacks, parts, payloads, strict=True):
            if feedback is not None:
                feedback.before(part)
            code.encode(part, payload, self.turn)
            if feedback is not None and code.rounds == 1:
                feedback.after(payload, 1)
        self.keep()
        self.turn += 1
        return self.payload

    def _gaps_from(self, start: int) -> list[tuple[int, int]]:
        """Where no parameter lies in the slice that begins at `start`, counted from there."""
        pieces = pieces_of(self.bucket, start, start + self.width)
        return gaps_of([(piece.start - start, piece.numel) for piece in pieces], self.width)
