"""What a choice costs a worker, known before anything runs: bytes that it holds, by kind; bytes that it sends, by axis.

Every choice of the slots exchange, compressor and pipeline schedule, and tensor parallel, says its own cost from a
`ModelProfile`; `shoal.plan.cost` adds them up. Kinds of what a worker holds when the update of a step begins:

    parameters   weights, frozen ones too, with the padding of their buckets
    buffers      of the model: running statistics, masks
    gradients    summed, or on their way
    optimizer    its state
    residuals    what compression has not sent yet (error feedback)
    outer        anchors and momentum of local and diloco
    working      vectors in flight, payloads, gathered units, buffers of messages: at their peak within the step
    activations  of stages: outputs that wait for their backward pass, at their peak

What autograd keeps inside of a stage or a model is not among them. Axes of what is sent: data, tensor, stage, server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Cost:
    """Bytes of one worker.

    >>> Cost({"parameters": 8}) + Cost({"parameters": 2, "gradients": 4}, {"data": 6.0})
    Cost(resident={'parameters': 10, 'gradients': 4}, wire={'data': 6.0})
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    wire: Mapping[str, float] = field(default_factory=dict)
    """Sent in a steady step; the mean over a round where workers meet every so many steps."""

    def __add__(self, other: Cost) -> Cost:
        kinds = dict.fromkeys((*self.resident, *other.resident))
        axes = dict.fromkeys((*self.wire, *other.wire))
        return Cost(
            {kind: self.resident.get(kind, 0) + other.resident.get(kind, 0) for kind in kinds},
            {axis: self.wire.get(axis, 0) + other.wire.get(axis, 0) for axis in axes},
        )

    def repeated(self, times: int) -> Cost:
        """Sent so many times in a step; what is held is held once."""
        return Cost(self.resident, {axis: nbytes * times for axis, nbytes in self.wire.items()})

    @property
    def total(self) -> int:
        """Bytes held, of all kinds."""
        return sum(self.resident.values())

    @property
    def sent(self) -> float:
        """Bytes sent in a step, along all axes."""
        return sum(self.wire.values())


NOTHING = Cost()


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer keeps of a parameter: Adam two numbers of each element, and one step count."""

    each: int = 0
    """Bytes for each element."""
    once: int = 0
    """Bytes for the tensor; again for each piece of it, where it is cut."""


@dataclass(frozen=True)
class ParameterProfile:
    """One parameter, or what tensor parallel has left of it on this worker."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trained: bool = True
    state: StateBytes = StateBytes()
    unit: str = ""
    """The block that it is part of, which zero3 gathers as one; empty outside of blocks."""
    share: float = 1.0
    """How much of it counts on this worker for the norm of the whole model."""
    contiguous: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def state_of(self, numel: int) -> int:
        """Optimizer state of a piece of so many elements."""
        return numel * self.state.each + self.state.once


@dataclass(frozen=True)
class StageProfile:
    """What goes between the stages of a pipeline."""

    microbatches: int
    passed: tuple[int, ...]
    """Bytes that pass each boundary, for one micro-batch."""
    tied: tuple[ParameterProfile, ...] = ()
    """Weights that several stages hold, whose gradients are summed."""


@dataclass(frozen=True)
class CutProfile:
    """Data around the cut layers of a model that all tensor ranks sum or gather, for one micro-batch."""

    summed: tuple[int, ...] = ()
    """Bytes of each tensor that is all-reduced: outputs in the forward pass, gradients of inputs in the backward."""
    gathered: tuple[int, ...] = ()
    """Bytes of each whole tensor that is all-gathered, or reduce-scattered."""


@dataclass(frozen=True)
class ModelProfile:
    """What a worker holds of a model, and how often it passes it in a step: all that costs follow from."""

    parameters: tuple[ParameterProfile, ...]
    """In the order in which their gradients become ready; zero3 needs units in the order of the backward pass."""
    buffers: int = 0
    """Bytes of the model's buffers."""
    accumulate: int = 1
    """Micro-batches of a step, without a pipeline."""
    norm: bool = False
    """Whether each step takes the norm of the gradient: to clip by it, or to see an overflow."""
    deterministic: bool = False
    stages: StageProfile | None = None
    cut: CutProfile = CutProfile()

    @property
    def trained(self) -> tuple[ParameterProfile, ...]:
        return tuple(p for p in self.parameters if p.trained)

    @property
    def frozen_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters if not p.trained)

    @property
    def passes(self) -> int:
        """How often a step comes to the end of a backward pass: a pipeline's micro-batches have one together."""
        return 1 if self.stages is not None else self.accumulate
