"""The contract of an exchange: how replicas agree on the next parameters.

A step calls, on every rank:

    claim(step, stop)           which step to do next; None when all are done
    first_part(step, own)       whose part of it to compute: its own, but where a server hands out the parts
    begin()                     a new step: parameters are fresh, gradients empty
    backward(loss, weight, last)   once per micro-batch; gradients leave while backward goes on
or  collect()                   once, where a pipeline has run the backward passes itself
    next_part(tally, foreseen)  one more part to compute, of a worker that was lost; -1: none
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.exchange.here import local
from shoal.exchange.rowtables import RowTables
from shoal.types import Memory, Promise

State = dict[str, dict[str, torch.Tensor]]
"""Optimizer state by parameter name, then by the optimizer's own key."""


@dataclass(frozen=True)
class Held:
    """Elements of a parameter from `start` on, counted flat in what tensor parallel has left of it here."""

    name: str
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Owned:
    """Elements of a tensor that a run needs besides parameters and the optimizer's state, by its kind."""

    kind: str
    held: Held
    alike: bool = False
    """Whether all replicas have the same. Else, with another number of replicas, all get the mean of the old ones'."""
    holders: int = 0
    """Not 0: what so many replicas have is a sum that they hold between them, each an equal share after a change."""


@dataclass(frozen=True)
class Tally:
    """A loss as a sum and a count."""

    total: float
    count: float


class Exchange(ABC):
    """How replicas agree on the next parameters."""

    promise: ClassVar[Promise]
    summary: ClassVar[str]
    bound: ClassVar[float] = 0.0
    """The share of what ddp learns in as many steps that may be lost, in the convergence tests."""
    Options: ClassVar[type]
    every_worker_computes: ClassVar[bool] = False
    """True if a worker without samples must run the model all the same, because others meet it there."""
    compresses: ClassVar[bool] = False
    """True if a compressor can be put between its workers."""
    cuts_parameters: ClassVar[bool] = False
    """True if parameters themselves are cut over the data axis, so that it needs the mesh in torch's own form."""
    whole_updates: ClassVar[bool] = False
    """True if every worker updates all parameters that it holds."""
    whole_models: ClassVar[bool] = False
    """True if a worker holds a whole model, which neither tensor parallel nor a pipeline has cut."""
    apart: ClassVar[bool] = False
    """True if workers meet at servers only: they run no collective, and each may be at another step."""
    keeps_rows: ClassVar[bool] = False
    """True if it keeps the rows of a SparseEmbedding, and brings them."""
    meets_after = 1
    """After so many steps, and multiples of them, all workers are at the same step."""
    saves = True
    """Whether this worker takes part in a checkpoint after the present step."""
    begins = True
    """Whether this worker looks for a checkpoint to begin from: not one that joins others who are at work."""
    counts_own = False
    """Whether what `finish` gives is of this worker's samples alone."""
    waited = 0.0  # seconds, so far, of waiting for others within backward passes
    memo: Any = None
    """What a worker that comes later must know to go on from here; a plain value."""
    told: Any = None
    """The memo of those who were here before, where one has come later."""
    tables: RowTables = RowTables()
    """Every SparseEmbedding whose rows are kept."""
    module: nn.Module
    """The model whose parameters are exchanged."""
    optimizer: torch.optim.Optimizer
    """The optimizer as it really runs, on whole parameters or on pieces; schedulers act on its groups."""

    order: Sequence[str]
    """The order in which parameters are laid out; part of a checkpoint, because sums round by it."""

    @abstractmethod
    def lay_out_again(self, order: list[str]) -> None:
        """Take over an order from a checkpoint, before its optimizer state."""

    def start(self, step: int, memo: Any) -> None:
        """Before the first step: what was loaded, or made, is what training begins with. Collective."""
        del step, memo

    def claim(self, step: int, stop: int) -> int | None:
        """The step to do next, of those from `step` up to `stop`, exclusively."""
        return step if step < stop else None

    def first_part(self, step: int, own: int) -> int:
        """Whose part of the step this worker computes; -1: nobody's. A step that was not claimed is claimed now."""
        del step
        return own

    def next_part(self, tally: Tally, foreseen: float) -> int:
        """A part is computed, and this is its loss; the next one to compute, or -1. `foreseen`: the step's count."""
        del tally, foreseen
        return -1

    def through(self, step: int) -> int:
        """The last step that is over for this worker, now that it has made `step`: later, if others went ahead."""
        return step

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        """Back-propagate loss × weight of one micro-batch; None where this rank has no sample in it."""

    def before_reduction(self) -> None:
        """A pipeline's backward passes are over, and what runs them is about to have gradients summed."""
        return

    def left(self, name: str) -> torch.Tensor | None:
        """The gradient that a pipeline has left for what is here of a parameter."""
        gradient = self.module.get_parameter(name).grad
        return None if gradient is None else local(gradient)

    def leave(self, name: str, gradient: torch.Tensor | None) -> None:
        """Put another in its place."""
        parameter = self.module.get_parameter(name)
        if gradient is None:
            parameter.grad = None
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient)

    @abstractmethod
    def collect(self) -> None:
        """Instead of `backward`: take the gradients that backward passes of a pipeline have left in `.grad`."""

    def refresh(self) -> None:
        """Bring the newest parameters here, where others change them meanwhile."""
        return

    def complete(self) -> None:
        """Until parameters are here that are on their way while nobody needs them."""
        return

    def fetch(self) -> None:
        """Before a checkpoint: bring here what is kept elsewhere."""
        return

    def owned(self, saving: bool) -> list[Owned]:
        """What else belongs to the run's state: what there is to save, or all that might be loaded."""
        del saving
        return []

    def numbers(self) -> dict[str, Any]:
        """The same, of plain values: this replica's own."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Go on from this replica's numbers; called only if there are as many replicas as there were."""
        del numbers

    def warm(self) -> dict[str, torch.Tensor]:
        """What this worker has found out and would find again, in time: saved, and used if all is as it was."""
        return {}

    def warm_up(self, found: Mapping[str, torch.Tensor]) -> None:
        """Start from what was found before."""
        del found

    def loaded(self, kinds: set[str]) -> None:
        """A checkpoint has been read, and of `owned` these kinds."""
        del kinds

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While it lasts, the model here is what all workers have learned so far. Collective."""
        self.refresh()
        yield

    def servers(self) -> dict[str, Any]:
        """How the servers are doing, where there are any: plain values, for the event log."""
        return {}

    def close(self) -> None:
        """The run is over."""
        return

    @abstractmethod
    def finish(self, tally: Tally) -> Tally: ...

    @abstractmethod
    def norm(self) -> float: ...

    @abstractmethod
    def update(self, factor: float, limit: float | None) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...

    def conclude(self) -> None:
        """No step comes after this one: put together what each worker has by itself. Collective."""
        return

    def rescale(self, by: float) -> None:
        """The loss is scaled by so much more from now on."""
        del by

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole summed gradients by name; between finish and update. Parameters without a gradient are absent."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, frozen ones too; whole but for what tensor parallel has cut. Collective."""
        plain = torch.contiguous_format
        named = self.module.named_parameters()
        return {name: local(p).detach().clone(memory_format=plain) for name, p in named}

    def held(self) -> list[Held]:
        """What is here of every parameter: the memory itself, for checkpoints to read and fill."""
        return [Held(name, 0, local(p).detach()) for name, p in self.module.named_parameters()]

    @abstractmethod
    def targets(self) -> list[Held]:
        """What the optimizer updates here, as the tensors that it knows."""

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
