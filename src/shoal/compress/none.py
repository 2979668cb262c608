"""Send gradients as they are.

When to use: on one host and on fast networks; it is what happens if nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.cast import Cast
from shoal.types import Promise


@dataclass(frozen=True)
class Uncompressed(Compressor):
    """Gradients travel in their own dtype."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "gradients travel as they are"
    bound: ClassVar[float] = 0.0
    feedback: bool = field(default=False, init=False)
    """Nothing is left out that could be sent later."""

    def code(self, layout: Layout) -> Code:
        return Verbatim(layout)


class Verbatim(Cast):
    """The payload is the vector."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, layout.dtype)

    def kept(self, feedback: bool) -> int:
        del feedback
        return 0

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        if factor is None:
            out.copy_(payload)
        else:
            out.add_(payload, alpha=factor)
