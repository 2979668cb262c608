"""Learning rates by name. Each is a torch scheduler; schedule.py says when it is stepped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError
from shoal.table import Table

MakeScheduler = Callable[[Optimizer], LRScheduler]


class LearningRate(Protocol):
    """A named schedule with its options filled in."""

    ends: ClassVar[bool]
    """Whether it has to know the last step."""

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler: ...


@dataclass(frozen=True)
class Constant:
    """The optimizer's own rate, after `warmup` steps of linear rise."""

    ends: ClassVar[bool] = False
    warmup: int = 0

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        del total_steps
        return LambdaLR(optimizer, lambda step: _rise(step, self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Linear rise over `warmup` steps, then half a cosine down to `floor` × the rate at the last step."""

    ends: ClassVar[bool] = True
    warmup: int = 0
    floor: float = 0.0

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        if total_steps is None:
            raise ConfigError(
                "schedule='cosine' ends with the last step, and how many a stream has is not known; give a number of "
                "steps, or another schedule."
            )

        def factor(step: int) -> float:
            if step < self.warmup:
                return _rise(step, self.warmup)
            done = (step - self.warmup) / max(total_steps - self.warmup, 1)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class Exponential:
    """Multiply by `gamma` after every step, or epoch, as `schedule_every` says."""

    ends: ClassVar[bool] = False
    gamma: float

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        del total_steps
        return ExponentialLR(optimizer, self.gamma)


@dataclass(frozen=True)
class StepDecay:
    """Multiply by `gamma` after every `size` steps, or epochs, as `schedule_every` says."""

    ends: ClassVar[bool] = False
    size: int
    gamma: float = 0.1

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        del total_steps
        return StepLR(optimizer, self.size, self.gamma)


@dataclass(frozen=True)
class Plateau:
    """Multiply by `factor` when the loss of a step has not improved for `patience` steps.

    With schedule_every="call": when the number given to `run.schedule_step` has not improved for `patience` calls.
    """

    ends: ClassVar[bool] = False
    factor: float = 0.1
    patience: int = 100

    def make(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        del total_steps
        return ReduceLROnPlateau(optimizer, factor=self.factor, patience=self.patience)


TABLE: Table[type[LearningRate]] = Table(
    "schedule",
    {
        "constant": Constant,
        "cosine": Cosine,
        "exponential": Exponential,
        "step": StepDecay,
        "plateau": Plateau,
    },
)


def make_scheduler(
    schedule: str | MakeScheduler | None, optimizer: Optimizer, total_steps: int | None
) -> LRScheduler | None:
    """The scheduler that a name such as "cosine(warmup=100)" or a function of the optimizer stands for."""
    if schedule is None:
        return None
    if isinstance(schedule, str):
        choice = parse_choice(schedule, "schedule")
        return fill_options(choice, TABLE.look_up(choice.name)).make(optimizer, total_steps)
    made = schedule(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"schedule= returned {type(made).__name__}; give a name such as 'cosine(warmup=100)' or a function "
            "of the optimizer that returns a torch LRScheduler."
        )
    return made


def advance(scheduler: LRScheduler, loss: float) -> None:
    """One training step is done."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    elif getattr(scheduler, "last_epoch", 0) == 0:  # a ChainedScheduler has none
        # torch warns where nobody has called optimizer.step before; under ps the servers did.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            scheduler.step()
    else:
        scheduler.step()


def schedule_state(scheduler: LRScheduler) -> dict[str, object]:
    """Where a scheduler stands, in values that JSON can hold.

    Torch keeps the rate itself in the optimizer's groups, and some schedulers move momentum too: both are
    here.
    """
    return {"scheduler": _plain(scheduler.state_dict()), "groups": rates(scheduler.optimizer)}


def restore_schedule(scheduler: LRScheduler, state: Mapping[str, object]) -> None:
    """Put a new scheduler of the same kind, and its optimizer's groups, where another one stood."""
    scheduler.load_state_dict(_filled(scheduler.state_dict(), state["scheduler"]))
    set_rates(scheduler.optimizer, state["groups"])


def rates(optimizer: Optimizer) -> Any:
    """What schedules and users set in each group, in values that JSON can hold."""
    return _plain([{k: group[k] for k in _MOVED if k in group} for group in optimizer.param_groups])


def set_rates(optimizer: Optimizer, groups: Any) -> None:
    """Put such values back."""
    for group, kept in zip(optimizer.param_groups, groups, strict=False):
        for key, value in kept.items():
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


_MOVED = ("lr", "momentum", "betas")
"""What torch's schedulers change in a group."""


def _plain(value: object) -> Any:
    """The part of a state that is numbers and text; functions and the like are made anew by the script."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if isinstance(key, str)}
    return value if isinstance(value, int | float | str) else None


def _filled(fresh: object, kept: object) -> Any:
    """A new scheduler's state with what was kept put in its place."""
    if isinstance(fresh, dict) and isinstance(kept, dict):
        return type(fresh)({key: _filled(value, kept.get(key)) for key, value in fresh.items()})
    if isinstance(fresh, list | tuple) and isinstance(kept, list) and len(fresh) == len(kept):
        return type(fresh)(_filled(*pair) for pair in zip(fresh, kept, strict=True))
    if isinstance(fresh, torch.Tensor) and isinstance(kept, int | float):
        return torch.full_like(fresh, kept)
    return fresh if kept is None else kept


def _rise(step: int, warmup: int) -> float:
    return min((step + 1) / warmup, 1.0) if warmup else 1.0
