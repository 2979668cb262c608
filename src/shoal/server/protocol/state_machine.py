"""The contract of a shard: a state machine that every server of its chain runs alike.

Servers of a chain apply the same operations in the same order and so hold the same state, bit for bit. A machine may
therefore use nothing but its state and the operation: no clock, no randomness without a key, no outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from shoal.server.protocol.messages import Where


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to do, or to find out."""

    name: str
    clock: int = 0
    """The training step that it is about."""
    args: Any = None
    """A plain value."""
    tensor: torch.Tensor | None = None
    """Flat; borrowed: whoever needs it after the call copies it."""
    client: int = 0
    codec: int = 0
    """Not 0: the tensor is what a compressor has made of the numbers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A value, and perhaps numbers."""

    value: Any = None
    tensor: torch.Tensor | None = None
    where: Where | None = None
    """Where processes of this host can read the tensor, if its machine keeps it in shared memory."""


class Refused(Exception):
    """An operation that can never be done, in a sentence for the user. State is as it was."""


def natural(value: object, what: str) -> int:
    """A whole number from 0 on, as a client should have sent it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused(f"{what} is {value!r}; it has to be a whole number from 0 on.")
    return value


class Machine(ABC):
    """The state of one shard."""

    @abstractmethod
    def apply(self, op: Operation) -> Answer:
        """Change the state. Called once for each operation, in the order of the log."""

    @abstractmethod
    def answer(self, op: Operation) -> Answer | None:
        """Read the state; None: not yet, try again after the next operation."""

    @abstractmethod
    def snapshot(self) -> tuple[Any, torch.Tensor]:
        """The whole state: a plain value and one flat uint8 tensor."""

    @abstractmethod
    def restore(self, value: Any, tensor: torch.Tensor) -> None:
        """Become what `snapshot` gave."""

    def metrics(self) -> dict[str, float]:
        """What a report may show."""
        return {}
