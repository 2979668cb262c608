"""The contract of a pipeline schedule: which rank computes what, in which order. Plain data, no processes.

A model is cut into stages, a batch into micro-batches. An action is one stage's work on one micro-batch. A
schedule lists every rank's actions in order; that is all it says. Who sends what to whom follows from it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shoal.cost import Cost, StageProfile
from shoal.errors import ConfigError
from shoal.types import Promise


class ActionKind(enum.Enum):
    """What is computed. A backward pass is B, or I and later W."""

    F = "forward"
    B = "full backward"
    I = "backward of the inputs only"  # noqa: E741  the letters are those of the papers
    W = "backward of the weights only"


@dataclass(frozen=True)
class Action:
    """One stage's work on one micro-batch.

    >>> print(Action(2, ActionKind.F, 0))
    2F0
    """

    stage: int
    kind: ActionKind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.micro}"

    __repr__ = __str__


@dataclass(frozen=True)
class Costs:
    """How long one stage takes for one micro-batch, in any unit.

    >>> Costs(forward=1.0, inputs=1.5, weights=0.5).backward
    2.0
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0

    @property
    def backward(self) -> float:
        """Time of the full backward pass."""
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def of(self, kind: ActionKind) -> float:
        """The time of one action of this kind."""
        if kind is ActionKind.F:
            return self.forward
        if kind is ActionKind.B:
            return self.backward
        return self.inputs if kind is ActionKind.I else self.weights


EVEN = Costs()
"""What matrix products cost: the backward pass takes two of the size of the forward pass's one."""


@dataclass(frozen=True)
class PipelineOptions:
    """What stands in the parentheses of `ppN(...)`."""

    schedule: str = "1f1b"
    """The schedule: who computes what when. `shoal list pipeline` shows the choices."""
    microbatches: int = 8
    """Into how many parts a worker's batch is cut."""
    split: str = ""
    """Names of the modules where stages begin, joined by "/"; empty finds them by measured cost."""


class Schedule(ABC):
    """Which rank computes what, in which order. Nothing has state: all methods are of the class."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    stages_per_rank: ClassVar[int] = 1
    halves_backward: ClassVar[bool] = False
    """True if a backward pass is done in two parts."""

    @classmethod
    def rank_of(cls, stage: int, ranks: int) -> int:
        """Which of the ranks runs a stage."""
        # Megatron's placement: with several stages a rank, neighbours in the model are always on neighbouring ranks.
        return stage % ranks

    @classmethod
    def refuse(cls, ranks: int, microbatches: int) -> str | None:
        """One sentence if this schedule cannot run with these numbers."""
        if ranks < 1:
            return f"a pipeline needs at least 1 rank; you have {ranks}. Use pp2."
        if microbatches < 1:
            return f"a pipeline needs at least 1 micro-batch; you have {microbatches}. Use microbatches=8."
        return None

    @classmethod
    def actions(cls, ranks: int, microbatches: int) -> list[list[Action]]:
        """Every rank's actions, in order: compute only, communication is implied."""
        refusal = cls.refuse(ranks, microbatches)
        if refusal is not None:
            raise ConfigError(refusal)
        return [cls.order(rank, ranks, microbatches) for rank in range(ranks)]

    @classmethod
    def bubble(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        """The idle share of all ranks' time by formula, where every stage costs the same."""
        makespan = cls.makespan(ranks, microbatches, costs)
        return 1 - cls.stages_per_rank * microbatches * costs.total / makespan if makespan else 0.0

    @classmethod
    def cost(cls, rank: int, ranks: int, stages: StageProfile) -> Cost:
        """Messages between stages: activations forward, their gradients back; torch keeps room for all that come."""
        last = cls.stages_per_rank * ranks - 1
        mine = [stage for stage in range(last + 1) if cls.rank_of(stage, ranks) == rank]
        out = {stage: stages.passed[stage] for stage in mine if stage < last}
        into = {stage: stages.passed[stage - 1] for stage in mine if stage > 0}
        messages = stages.microbatches * (sum(out.values()) + sum(into.values()))
        held = peak = kept = 0
        # Outputs of a stage stay from its forward pass until its backward pass: torch needs them to send and to
        # differentiate.
        for action in cls.order(rank, ranks, stages.microbatches):
            if action.kind is ActionKind.F:
                held += out.get(action.stage, 0)
            elif action.kind in (ActionKind.B, ActionKind.W):
                held -= out.get(action.stage, 0)
            else:  # torch leaves the gradient of an input where it is
                kept += into.get(action.stage, 0)
            peak = max(peak, held)
        return Cost({"working": messages + kept, "activations": peak}, {"stage": messages})

    @classmethod
    @abstractmethod
    def order(cls, rank: int, ranks: int, microbatches: int) -> list[Action]:
        """One rank's actions."""

    @classmethod
    @abstractmethod
    def makespan(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        """The time from the first action to the last by formula, where every stage costs the same."""

    @classmethod
    @abstractmethod
    def peak(cls, rank: int, ranks: int, microbatches: int) -> int:
        """The most forward activations this rank holds at once, one for each stage and micro-batch."""


def one_forward_one_backward(
    forwards: list[Action], backwards: list[list[Action]], ahead: int
) -> list[Action]:
    """`ahead` forward passes, then a forward and a backward pass in turn, then the backward passes that are left.

    >>> F, B = ([Action(0, kind, micro) for micro in range(3)] for kind in (ActionKind.F, ActionKind.B))
    >>> one_forward_one_backward(F, [[b] for b in B], ahead=1)
    [0F0, 0F1, 0B0, 0F2, 0B1, 0B2]
    """
    # Warm-up, steady state and cool-down of 1F1B in one loop: when forwards run out, slices of them are empty.
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += forwards[ahead + number : ahead + number + 1]
        order += backward
    return order
