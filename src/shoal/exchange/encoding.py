"""Gradients that leave a worker compressed, shard by shard, with what was left out so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.compress.base import Compressor, Layout
from shoal.compress.feedback import Feedback
from shoal.exchange.shards import Shard
from shoal.world.buckets import gaps_of

_CPU = torch.device("cpu")


class Encoding:
    """One shard's code, what it has not sent, and the payload: memory that must stay as it is until it is answered."""

    def __init__(self, shard: Shard, compressor: Compressor) -> None:
        layout = Layout(shard.size, shard.bucket.dtype, _CPU)
        self._code = compressor.code(layout)
        self._feedback = Feedback(self._code, layout) if compressor.feedback else None
        pieces = [(piece.start - shard.start, piece.numel) for piece in shard.pieces]
        self._gaps = gaps_of(pieces, shard.size)
        self.payload = self._code.payload()

    def encode(self, gradient: torch.Tensor, turn: int, part: int) -> None:
        """Fill the payload with a part of a step; the gradient gets what was left out before."""
        # Lots are the part's, not the worker's: who takes over a lost worker's part rounds it as that one would have.
        self._code.salt = part
        if self._feedback is not None:
            self._feedback.before(gradient)
        self._code.encode(gradient, self.payload, turn)
        if self._feedback is not None:
            self._feedback.after(self.payload, 1)
            for start, stop in self._gaps:  # nobody's: a sign is never nothing, and would add up here
                self._feedback.residual[start:stop].zero_()

    def forget(self) -> None:
        """What was left out is of a step that does not count."""
        if self._feedback is not None:
            self._feedback.reset()

    def scale(self, by: float) -> None:
        """Gradients are larger by so much from now on."""
        if self._feedback is not None:
            self._feedback.scale(by)


def make_encodings(shards: Sequence[Shard], compressor: Compressor | None) -> dict[int, Encoding]:
    """By the numbers of the shards; none where gradients travel as they are."""
    return {} if compressor is None else {shard.number: Encoding(shard, compressor) for shard in shards}
