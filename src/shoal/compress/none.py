"""Send gradients as they are.

When to use: on one host and on fast networks; it is what happens if nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shoal.compress.base import Code, Compressor, Layout
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


class Verbatim(Code):
    """The payload is the vector."""

    summable = True
    elementwise = True

    def payload(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=self.layout.dtype, device=self.layout.device)

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        del turn
        out.copy_(vector)

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        if factor is None:
            out.copy_(payload)
        else:
            out.add_(payload, alpha=factor)

    def nbytes(self) -> int:
        return self.layout.nbytes
