"""Number formats: what the forward pass computes in, and how fp16 keeps small gradients alive.

Parameters, gradients and their exchange stay in the model's own dtype; `bf16` and `fp16` change what the forward
and backward passes compute in (autocast). fp16 cannot hold numbers below 6e-8, so the loss is multiplied by a
scale that grows while all goes well and shrinks when any rank overflows. Whether it did is read off the
gradient norm after the exchange, which is the same number on every rank, so all ranks agree without asking.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from shoal.table import Table


@dataclass(frozen=True)
class Precision:
    """What computes in which format."""

    summary: str
    compute: torch.dtype | None = None
    """Autocast to this; None computes in the dtype of the operands."""
    model: torch.dtype | None = None
    """Cast parameters and floating-point inputs to this; None leaves them."""
    scaled: bool = False

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """What the forward pass runs in."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


TABLE: Table[Precision] = Table(
    "precision",
    {
        "fp32": Precision("as the model is, usually 32 bits"),
        "bf16": Precision("compute in bfloat16, parameters in 32 bits", compute=torch.bfloat16),
        "fp16": Precision("compute in float16 with loss scaling", compute=torch.float16, scaled=True),
        "fp64": Precision("everything in 64 bits: for proofs", model=torch.float64),
    },
)


@dataclass
class LossScale:
    """The factor on the loss; 1 for ever unless `dynamic`.

    >>> scale = LossScale(dynamic=True)
    >>> scale.overflowed(); scale.value
    32768.0
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0
    grow_after: int = 2000

    def __post_init__(self) -> None:
        if self.dynamic and self.value == 1.0:
            self.value = 2.0**16

    def overflowed(self) -> None:
        """A gradient was not finite: try smaller."""
        if self.dynamic:
            self.value = max(self.value / 2, 2.0**-24)
            self.good_steps = 0

    def succeeded(self) -> float:
        """A step went well; after enough of them, try larger. Returns by how much."""
        before = self.value
        self.good_steps += 1
        if self.dynamic and self.good_steps >= self.grow_after:
            self.value = min(self.value * 2, 2.0**24)
            self.good_steps = 0
        return self.value / before
