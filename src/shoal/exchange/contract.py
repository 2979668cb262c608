"""The contracts of an exchange, one for each caller: how replicas agree on the next parameters.

    Stepper         train/step.py       one step: gradients summed, applied, published
    WorkSource      train/loop.py       which step to do next, and whose samples of it
    StateView       train/state/run_state.py  what a checkpoint saves and loads; what an evaluation sees
    PipelineGrads   train/pipelined.py  gradients that a pipeline's own runtime has left behind
    LossTerms       train/own_step      several losses, back-propagated into one of several models
    Facts           plan, list, docs    what is known of a choice before anything runs (facts.py)

A step calls, on every rank:

    begin(view)                    parameters are fresh, gradients empty
    backward(loss, weight, last)   once per micro-batch; full buckets are sent while backward goes on
or  collect()                      once, where a pipeline has run the backward passes itself
    finish(tally)                  wait; the global sum and count of the loss come back
    add_gradients(grads, weight)   if there is a penalty on weights that are cut: its gradient, the same on all replicas
    grad_norm()                    if somebody needs it: the global norm of the summed gradient
    apply(factor, clamp)           gradient × factor, clamped to ±clamp, into the optimizer; this worker's part only
    publish()                      every worker sees what `apply` has changed
or  discard()                      instead of the last two: forget this step's gradients

The loss that goes into backward is a sum, so gradients are sums, times `weight`; `factor` turns them into the mean over
the true global count. Where the weight was one over that count already, it is 1 and costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from shoal.errors import ConfigError, TornStep
from shoal.exchange.facts import Facts
from shoal.exchange.local_tensor import local
from shoal.exchange.row_tables import RowTables
from shoal.world.world import World

State = dict[str, dict[str, torch.Tensor]]
"""Optimizer state by parameter name, then by the optimizer's own key."""

Numbers = dict[str, list[float]]
"""Plain numbers of one replica's state, by name."""


@dataclass(frozen=True)
class LocalShard:
    """Elements of a parameter from `start` on, counted flat in what tensor parallel has left of it here."""

    name: str
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class ExtraState:
    """Elements of a tensor that a run needs besides parameters and the optimizer's state, by its kind."""

    kind: str
    held: LocalShard
    alike: bool = False
    """Whether all replicas have the same. Else, with another number of replicas, all get the mean of the old ones'."""
    holders: int = 0
    """Not 0: what so many replicas have is a sum that they hold between them, each an equal share after a change."""


@dataclass(frozen=True)
class Tally:
    """A loss as a sum and a count."""

    total: float
    count: float


@dataclass(frozen=True)
class JoinState:
    """What a worker that joins in the middle of a run must know to compute what the others do."""

    count_per_sample: float
    loss_scale: float
    good_steps: int
    by_module: bool | None = None  # whether modules have random streams of their own, once that is known


@dataclass(frozen=True)
class StepView:
    """One worker's share of one step; steps are counted from 0."""

    step: int
    part: int | None = None
    """Whose samples of it to compute: None, this worker's own; -1, nobody's."""
    joined: JoinState | None = None
    """From running workers, where this one follows what they know (parameter server)."""

    @property
    def computes(self) -> bool:
        return self.part is None or self.part >= 0


class Stepper(ABC):
    """What one training step asks of an exchange, in this order."""

    optimizer: torch.optim.Optimizer
    """The optimizer as it really runs, on whole parameters or on slices; schedulers act on its groups."""

    @abstractmethod
    def begin(self, view: StepView) -> None:
        """A new step: parameters are fresh, gradients empty."""

    @abstractmethod
    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        """Back-propagate loss × weight of one micro-batch; None where this rank has no sample in it."""

    @abstractmethod
    def finish(self, tally: Tally) -> Tally:
        """Wait for the sums of all gradients; the loss over all replicas."""

    @abstractmethod
    def add_gradients(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        """After `finish`: add to the sums what all replicas know alike, × weight, by name and as large as what this
        worker's model has of each parameter. A parameter that had no gradient has one now."""

    def withhold(self, names: Collection[str]) -> None:
        """After `finish`: as if these parameters had no gradient; the same names on all who hold them."""
        raise NotImplementedError(f"{type(self).__name__} withholds no gradient of {', '.join(names)}")

    @abstractmethod
    def grad_norm(self) -> float:
        """The norm of the summed gradient of the whole model. Collective."""

    @abstractmethod
    def apply(self, factor: float, clamp: float | None) -> None:
        """The optimizer's step on what this worker updates, with gradient × factor. Others do not see it yet."""

    @abstractmethod
    def publish(self) -> None:
        """Every worker sees what `apply` has changed. Collective."""

    @abstractmethod
    def discard(self) -> None:
        """Instead of apply and publish, when the numbers are bad and every worker is alive. Collective."""

    def rescale(self, by: float) -> None:
        """The loss is scaled by so much more from now on; gradients that wait to be sent follow."""
        del by


class Recovery(ABC):
    """An exchange as a run uses it when a worker is lost."""

    @abstractmethod
    def abort(self) -> None:
        """A peer is gone: leave the step where it is. No collective, and nothing of it is left under way.

        A step that has been applied counts; any other is as if it had never begun, and can be done again.
        """

    @abstractmethod
    def reopen(self, world: World, model_world: World) -> None:
        """After `abort`: the same state among these members, as many as before and in the same order. Collective.

        Finishes a `publish` that was cut short. Raises `TornStep` where some have applied the step and others not.
        """


class WorkSource(Protocol):
    """The source of work for the loop: which step is next, whose samples of it, and when the run is over."""

    @property
    def loss_is_local(self) -> bool:
        """Whether `finish` gives the loss of this worker's samples alone."""

    @property
    def saves(self) -> bool:
        """Whether this worker takes part in a checkpoint after the present step."""

    def next(self, after: int, stop: int | None) -> StepView | None:
        """The step to do when `after` steps are done; None when all of those before `stop` are done or taken."""

    def next_part(self, view: StepView, tally: Tally, expected_count: float) -> StepView:
        """A part is computed and this is its loss; the next one of the step, such as a lost worker's, or none."""

    def committed(self, view: StepView, state: JoinState) -> int:
        """The step is done, and whoever joins now starts from `state`. The number of steps that are done with it."""

    def final_sync(self) -> None:
        """No step comes after this one: average what each worker has learned by itself. Collective."""


class Sequential:
    """One step after the other, each worker its own part: all exchanges without servers or rounds."""

    loss_is_local = False
    saves = True

    def next(self, after: int, stop: int | None) -> StepView | None:
        return StepView(after) if stop is None or after < stop else None

    def next_part(self, view: StepView, tally: Tally, expected_count: float) -> StepView:
        del tally, expected_count
        return StepView(view.step, part=-1)

    def committed(self, view: StepView, state: JoinState) -> int:
        del state
        return view.step + 1

    def final_sync(self) -> None:
        return


class PipelineGrads(ABC):
    """What a pipeline asks, whose runtime runs the backward passes itself and leaves gradients in `.grad`."""

    module: nn.Module
    """The model whose parameters are exchanged."""

    def before_reduce(self) -> None:
        """The backward passes are over, and the runtime is about to have gradients summed."""
        return

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient that was left for what is here of a parameter."""
        gradient = self.module.get_parameter(name).grad
        return None if gradient is None else local(gradient)

    def set_grad(self, name: str, gradient: torch.Tensor | None) -> None:
        """Put another in its place."""
        parameter = self.module.get_parameter(name)
        if gradient is None:
            parameter.grad = None
            return
        if parameter.grad is None:
            # A DTensor where the parameter is one: the pipeline sets gradients on stages that tensor parallel has cut,
            # too.
            parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient)

    @abstractmethod
    def collect(self) -> None:
        """Instead of `backward`: take over the gradients in `.grad`, to be summed."""


class LossTerms:
    """What a step of the user's own asks (`takes_own_step`), instead of `backward`: terms, then `finish` as ever."""

    @property
    def sends_terms(self) -> bool:
        """Whether the next term needs the other workers before `close_terms`."""
        return False

    def add_term(self, loss: torch.Tensor | None, weight: float, retain_graph: bool) -> None:
        """Back-propagate loss × weight into the parameters of this exchange's model and into nothing else."""
        del loss, weight, retain_graph
        raise NotImplementedError(f"{type(self).__name__} takes no step of the user's own")

    def close_terms(self) -> None:
        """No term comes after those that were added: send what has not been sent."""
        return

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """While it lasts, every worker may change its parameters, all in the same way. Collective."""
        yield


class WholeView(ABC):
    """State by parameter name, whole but for what tensor parallel has cut: `verify`, `state_dict`, tests.

    All of these are collective.
    """

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter, frozen ones too."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """Summed gradients, between finish and apply. Parameters without a gradient are absent."""

    @abstractmethod
    def optimizer_state(self) -> State: ...

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None: ...


class StateView(ABC):
    """What a checkpoint saves and fills: the memory itself, as it lies on this worker."""

    order: Sequence[str]
    """The order in which parameters are laid out; part of a checkpoint, because sums round by it."""
    tables: RowTables = RowTables()
    """Every SparseEmbedding whose rows are kept."""

    @abstractmethod
    def lay_out_again(self, order: list[str]) -> None:
        """Take over an order from a checkpoint, before its optimizer state."""

    def prepare_save(self) -> None:
        """Bring here what is kept elsewhere."""
        return

    @abstractmethod
    def parameter_shards(self) -> list[LocalShard]:
        """This worker's shard of every parameter."""

    @abstractmethod
    def optimizer_shards(self) -> list[LocalShard]:
        """The shards that this worker's optimizer updates; its state is keyed by these tensors."""

    @abstractmethod
    def gradient_shards(self) -> list[LocalShard]:
        """Summed gradients of what this worker updates, between finish and apply: the memory that `apply` reads."""

    def extras(self, saving: bool) -> list[ExtraState]:
        """State besides parameters and optimizer state: the tensors to save, or all that could be loaded."""
        del saving
        return []

    def loaded(self, kinds: set[str]) -> None:
        """A checkpoint has been read, and of `extras` these kinds."""
        del kinds

    def numbers(self) -> Numbers:
        """Plain numbers that belong to the state of this replica alone."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Sequence[float]]) -> None:
        """Go on from this replica's numbers; called only if there are as many replicas as there were."""
        del numbers

    def warm(self) -> dict[str, torch.Tensor]:
        """What this worker has found out and would find again, in time: saved, and used if all is as it was."""
        return {}

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        """Start from what was found before."""
        del found


class Exchange(Stepper, Recovery, PipelineGrads, LossTerms, WholeView, StateView, Facts):
    """One way for replicas to agree on the next parameters: all contracts at once. Callers see one of them each."""

    sync_interval = 1
    """After so many steps, and multiples of them, all workers are at the same step."""
    meeting_interval = 1
    """After so many steps, and multiples of them, no worker goes on before all others are there."""
    begins = True
    """Whether this worker looks for a checkpoint to begin from: not one that joins others who are at work."""
    waited = 0.0
    """Seconds, so far, of waiting for others within backward passes."""

    @property
    def work(self) -> WorkSource:
        """Where steps come from."""
        return _SEQUENTIAL

    def start(self, step: int, state: JoinState | None) -> None:
        """Before the first step: what was loaded, or made, is what training begins with. Collective."""
        del step, state

    @property
    def optimizer_kind(self) -> str:
        """The name of the optimizer; a checkpoint's state fits no other."""
        return type(self.optimizer).__name__

    def complete(self) -> None:
        """Until parameters are here that are on their way while nobody needs them."""
        return

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts, the model here is what all workers have learned so far. Collective."""
        yield

    def servers(self) -> dict[str, object]:
        """The load of the servers, if there are any: plain values, for the event log."""
        return {}

    def close(self) -> None:
        """The run is over."""
        return

    def parameters(self) -> dict[str, torch.Tensor]:
        plain = torch.contiguous_format
        named = self.module.named_parameters()
        return {name: local(p).detach().clone(memory_format=plain) for name, p in named}

    def parameter_shards(self) -> list[LocalShard]:
        return [LocalShard(name, 0, local(p).detach()) for name, p in self.module.named_parameters()]


_SEQUENTIAL = Sequential()


def check_members(before: World, world: World) -> None:
    """Refuse to go on from one worker's share of a state among fewer or more workers."""
    if (world.rank, world.size) != (before.rank, before.size):
        raise ConfigError(
            f"rank {before.rank} of {before.size} cannot go on as rank {world.rank} of {world.size}: its part of "
            "the state is another one then; start from a checkpoint."
        )


def check_not_torn(world: World, applied: bool) -> None:
    """All members have applied the step that was cut short, or none has. Collective."""
    # `apply` is local and `publish` collective: a worker may be lost between the two, after some have applied.
    flags = world.gather_numbers([float(applied)])[:, 0].tolist()
    if len(set(flags)) > 1:
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        raise TornStep(
            f"the step was applied on ranks {ranks} of {len(flags)} only when a worker was lost; start from a "
            "checkpoint."
        )


def back_propagate(loss: torch.Tensor | None, weight: float) -> None:
    """The backward pass of loss × weight."""
    if loss is not None:
        # The weight goes in as the gradient of the loss: multiplying the loss would add a node, and a rounding, to the
        # graph.
        loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]


def back_propagate_into(
    parameters: Iterable[nn.Parameter], loss: torch.Tensor | None, weight: float, retain_graph: bool
) -> None:
    """The backward pass of loss × weight, as far as it leads to these parameters: no other one gets a gradient."""
    if loss is not None:
        torch.autograd.backward(
            loss, torch.full_like(loss, weight), retain_graph=retain_graph, inputs=list(parameters)
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get gradients, each once, by its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def detached(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """One parameter's optimizer state with every entry as a tensor of its own."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        for key, value in state.items()
        if value is not None
    }
