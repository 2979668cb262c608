"""Send each value as a float16: 11 bits of precision, a range from 6e-8 to 65504.

When to use: where half the bytes are enough to save and values are neither tiny nor huge; it is eight times as precise
as bf16. A finite value beyond the range travels as ±65504, so that one large gradient does not spoil a step; what was
infinite or undefined before stays so. Sums are made in float16 too: they overflow to infinity if the sum of all
workers is beyond the range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.cast import Cast, chunks

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Fp16(Compressor):
    """Values travel in float16, with a relative error of 1/2048 at most within its range, and are summed in it."""

    summary: ClassVar[str] = "half the bytes: float16, 11 bits of precision, values beyond ±65504 cut"
    bound: ClassVar[float] = 0.01
    feedback: bool = False

    def code(self, layout: Layout) -> Code:
        return Half(layout, torch.float16)


class Half(Cast):
    """A cast that does not overflow."""

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        del turn
        for start, stop in chunks(vector.numel()):
            wide, half = vector[start:stop], out[start:stop]
            # A look at a value makes the host wait for a card, where clamping costs little.
            if not (wide.is_cpu and _is_small(wide)):
                wide = wide.float() if wide.dtype == torch.bfloat16 else wide  # which has no 65504
                wide = torch.where(wide.isinf(), wide, wide.clamp(-LARGEST, LARGEST))
            half.copy_(wide)


def _is_small(values: torch.Tensor) -> bool:
    """Whether certainly all values are within the range; a sum of squares costs a third of what clamping does."""
    return bool(torch.dot(values, values) <= LARGEST**2)
