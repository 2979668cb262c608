"""Send one byte per element, with a scale for each block of them.

Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; blocks as in Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022.
When to use: a quarter of the bytes at an error that training seldom notices. Payloads are gathered, not summed, so
what each worker receives grows with the number of workers: with many of them bf16 may be less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.scaled_blocks import Blockwise

BLOCK = 256
STEPS = 127
SMALLEST = 1e-30
"""The largest value of a block counts as this at least: a scale of 0 could not be divided by."""


@dataclass(frozen=True)
class Int8(Compressor):
    """Each block of 256 values is divided by its largest absolute value and rounded to 1/127 of it."""

    summary: ClassVar[str] = "a quarter of the bytes: one byte per element, one scale per 256"
    bound: ClassVar[float] = 0.01
    feedback: bool = False

    def code(self, layout: Layout) -> Code:
        return Bytes(layout)


class Bytes(Blockwise):
    """A signed byte for each element, rounded to nearest: off by half a step of its block at most."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, BLOCK, per_byte=1)

    def pack(self, rows: torch.Tensor, work: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        # Undefined if one element is: then the whole block is. Two reductions are faster than abs and one.
        torch.amax(rows, 1, out=scales)
        torch.maximum(scales, torch.amin(rows, 1).neg_(), out=scales)
        scales.clamp_(min=SMALLEST).mul_(1 / STEPS)
        torch.mul(rows, scales.reciprocal().unsqueeze(1), out=work)
        out.view(torch.int8).copy_(work.round_())

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(packed.view(torch.int8))
        out.mul_(scales.unsqueeze(1))
