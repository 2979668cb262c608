"""Send one bit per element: its sign. A scale for each block of them is the mean of their absolute values.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; the scale and why feedback is needed: Karimireddy
et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
When to use: a thirty-first of the bytes, where the network is slow and there are few workers: payloads are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.scaled_blocks import Blockwise

BLOCK = 1024
GATHER = 0x0102040810204080
"""Times a word whose 8 bytes are 0 or 1: its highest byte then has those 8 bits, the first byte's lowest."""
REPEAT = 0x0101010101010101
"""Times a byte: a word of 8 such bytes."""
PICK = 0x8040201008040201 - (1 << 64)
"""And with it: of byte i only bit i remains. Minus 2⁶⁴ as words are signed."""
ROUND_UP = 0x7F7F7F7F7F7F7F7F
"""Plus, of byte i: its highest bit is set if any was."""
MINUS = 0xFE
"""Times a byte that is 1, plus 1: -1 as a signed byte. Of a byte that is 0 this makes 1."""


@dataclass(frozen=True)
class Sign(Compressor):
    """Each element becomes plus or minus the mean absolute value of its block of 1024."""

    summary: ClassVar[str] = "1 bit per element: its sign, and the mean size of 1024"
    bound: ClassVar[float] = 0.35
    feedback: bool = True

    def code(self, layout: Layout) -> Code:
        return Bits(layout)


class Bits(Blockwise):
    """A bit for each element, eight in a byte, set where it is negative."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, BLOCK, per_byte=8)

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        super().encode(vector, out, turn)
        over = -self.layout.size % self.block
        if over:  # the zeros that fill the last block are none of its elements
            self._parts(out)[0][-1].mul_(self.block / (self.block - over))

    def pack(self, rows: torch.Tensor, work: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        torch.abs(rows, out=work)
        torch.sum(work, 1, out=scales)
        scales.mul_(1 / self.block)
        # The bit that is the sign, all over a byte. (A comparison, which makes truth values, is several times slower.)
        torch.bitwise_right_shift(rows.view(torch.int32), 31, out=work.view(torch.int32))
        negative = work.view(torch.int32).to(torch.int8).view(torch.int64).bitwise_and_(REPEAT)
        out.copy_(negative.mul_(GATHER).bitwise_right_shift_(56))

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        words = packed.to(torch.int64).mul_(REPEAT).bitwise_and_(PICK)
        words.add_(ROUND_UP).bitwise_right_shift_(7).bitwise_and_(REPEAT)
        out.copy_(words.mul_(MINUS).add_(REPEAT).view(torch.int8))
        out.mul_(scales.unsqueeze(1))
