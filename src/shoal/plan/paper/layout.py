"""How a transformer is laid out over cards: degrees, what is cut, and how a global batch is eaten."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One way to train one model on so many cards."""

    global_batch: int
    data: int = 1
    tensor: int = 1
    stages: int = 1
    context: int = 1
    """Cards that share the positions of a sequence."""
    virtual: int = 1
    """Stages on each card, interleaved."""
    micro_batch: int = 1
    zero: int = 0
    """What is cut over the data axis: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    recompute: str = "none"
    """none, selective (attention again) or full (whole layers again)."""
    sequence: bool = False
    """Whether norms and dropout are cut over the tensor axis too."""
    precision: str = "bf16"
    moments: int = 12
    """Bytes of an optimizer for each number: fp32 weights and two moments."""

    @property
    def cards(self) -> int:
        """How many there are."""
        return self.data * self.tensor * self.stages * self.context

    @property
    def microbatches(self) -> int:
        """That each replica computes in a step, one after the other."""
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))

    @property
    def bubble(self) -> float:
        """Time that a stage waits, beside what it works."""
        return (self.stages - 1) / (self.virtual * self.microbatches)
