"""Send the upper half of each float32: the range of float32, 8 bits of precision.

Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
When to use: where half the bytes are enough to save. It cannot overflow, and needs no tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.cast import Cast


@dataclass(frozen=True)
class Bf16(Compressor):
    """Values travel in bfloat16, with a relative error of 1/256 at most, and are summed in it."""

    summary: ClassVar[str] = "half the bytes: bfloat16, the range of float32 with 8 bits of precision"
    bound: ClassVar[float] = 0.01
    feedback: bool = False

    def code(self, layout: Layout) -> Code:
        return Cast(layout, torch.bfloat16)
