"""The contract of an exchange: how replicas agree on the next parameters.

A step calls, on every rank:

    begin()                     a new step: parameters are fresh, gradients empty
    backward(loss, weight, last)   once per micro-batch; gradients leave while backward goes on
    finish(tally)               wait; the global sum and count of the loss come back
    norm()                      if somebody needs it: the global norm of the summed gradient
    update(factor, limit)       gradient × factor, clamped to ±limit, into the optimizer; parameters published
or  drop()                      instead of update: forget this step's gradients

The loss that goes into backward is a sum, so gradients are sums, times `weight`; `factor` turns them into the
mean over the true global count. Where the weight was one over that count already, it is 1 and costs nothing.
What an exchange holds it can also give whole, by parameter name: `gradients`, `optimizer_state`. These are
collective: every rank calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.types import Memory, Promise
from shoal.world.world import World

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
State = dict[str, dict[str, torch.Tensor]]
"""Optimizer state by parameter name, then by the optimizer's own key."""


@dataclass(frozen=True)
class NoOptions:
    """For choices without options."""


@dataclass(frozen=True)
class BucketOptions:
    """Options of the flat-bucket exchanges."""

    bucket_mb: float = 16.0
    """Gradients travel in vectors of about this many megabytes."""


@dataclass(frozen=True)
class Setup:
    """What an exchange is made from."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    world: World
    accumulate: int = 1
    deterministic: bool = False


@dataclass(frozen=True)
class Tally:
    """A loss as a sum and a count."""

    total: float
    count: float


class Exchange(ABC):
    """How replicas agree on the next parameters."""

    promise: ClassVar[Promise]
    summary: ClassVar[str]
    Options: ClassVar[type]
    optimizer: torch.optim.Optimizer
    """The optimizer as it really runs, on whole parameters or on pieces; schedulers act on its groups."""

    order: Sequence[str]
    """The order in which parameters are laid out; part of a checkpoint, because sums round by it."""

    @abstractmethod
    def lay_out_again(self, order: list[str]) -> None:
        """Take over an order from a checkpoint, before its optimizer state."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        """Back-propagate loss × weight of one micro-batch; None where this rank has no sample in it."""

    @abstractmethod
    def finish(self, tally: Tally) -> Tally: ...

    @abstractmethod
    def norm(self) -> float: ...

    @abstractmethod
    def update(self, factor: float, limit: float | None) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole summed gradients by name; between finish and update. Parameters without a gradient are absent."""

    @abstractmethod
    def optimizer_state(self) -> State: ...

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None: ...

    @classmethod
    @abstractmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        """Bytes per worker for so many parameters; Adam keeps two numbers of state per parameter."""


def back_propagate(loss: torch.Tensor | None, weight: float) -> None:
    """The backward pass of loss × weight."""
    if loss is not None:
        loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, each once, by its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def detached(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """One parameter's optimizer state with every entry as a tensor of its own."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
        for key, value in state.items()
        if value is not None
    }


def sum_of_squares(vectors: Iterable[torch.Tensor]) -> float:
    """Σ v² in double precision over the vectors' own norms."""
    return sum(float(torch.linalg.vector_norm(v)) ** 2 for v in vectors)
