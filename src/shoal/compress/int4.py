"""Send half a byte per element, with a scale for each block of them.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017.
When to use: nearly an eighth of the bytes, where `int8` is not enough. Values are rounded up or down by chance, so that
they are right in the mean, small ones too: nothing has to be sent later, which optimizers such as Adam take ill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.cast import CHUNK
from shoal.compress.int8 import SMALLEST
from shoal.compress.scaled_blocks import Blockwise
from shoal.seeds import derive

BLOCK = 256
STEPS = 7
LOT = 0.4999
"""Lots are drawn from ± this: a little less than a half, so that the largest value never becomes one more."""


@dataclass(frozen=True)
class Int4(Compressor):
    """Each block of 256 values is divided by its largest absolute value and rounded by lot to 1/7 of it."""

    summary: ClassVar[str] = "an eighth of the bytes: half a byte per element, one scale per 256"
    bound: ClassVar[float] = 0.02
    feedback: bool = False

    def code(self, layout: Layout) -> Code:
        return Halves(layout)


class Halves(Blockwise):
    """Two elements in a byte, the first in its lower half; 8 stands for zero."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, BLOCK, per_byte=2)
        self._lots: torch.Tensor | None = None
        self._span = max(self.block, min(CHUNK, self._blocks * self.block))
        self._at = 0

    def kept(self, feedback: bool) -> int:
        return super().kept(feedback) + 2 * self._span * 4

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        self._at = derive(turn, "int4", self.salt) % self._span
        super().encode(vector, out, turn)

    def pack(self, rows: torch.Tensor, work: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        # Undefined if one element is: then the whole block is.
        torch.amax(rows, 1, out=scales)
        torch.maximum(scales, torch.amin(rows, 1).neg_(), out=scales)
        scales.clamp_(min=SMALLEST).mul_(1 / STEPS)
        torch.addcmul(
            self._draw(rows.numel()).view(rows.shape), rows, scales.reciprocal().unsqueeze(1), out=work
        )
        pairs = work.round_().add_(STEPS + 1).to(torch.int8).view(torch.int16)
        out.copy_(pairs.bitwise_or_(pairs >> 4).bitwise_and_(255))

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        pairs = packed.to(torch.int16)
        pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        out.copy_(pairs.view(torch.int8))
        out.sub_(STEPS + 1).mul_(scales.unsqueeze(1))

    def _draw(self, count: int) -> torch.Tensor:
        """The next lots. A few are drawn once and read from other places each time: drawing all anew would cost more
        than everything else together."""
        if self._lots is None:
            generator = torch.Generator().manual_seed(derive(0, "int4"))
            drawn = torch.rand(2 * self._span, generator=generator, dtype=torch.float32, device="cpu")
            lots = drawn.sub_(0.5).mul_(2 * LOT)
            self._lots = lots.to(self.layout.device)
        self._at = (self._at + 40_503) % self._span
        return self._lots[self._at : self._at + count]
