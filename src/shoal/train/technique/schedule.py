"""When a learning rate moves: after each step, after each epoch, or when the user calls `run.schedule_step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.config import parse_choice
from shoal.errors import ConfigError
from shoal.train.technique import learning_rate
from shoal.train.technique.learning_rate import (
    MakeScheduler,
    advance,
    make_scheduler,
    restore_schedule,
    schedule_state,
)

EVERY = ("step", "epoch", "call")


@dataclass
class Schedule:
    """A torch scheduler, and when it moves."""

    scheduler: LRScheduler
    every: str
    """step, epoch or call."""
    called: bool = False
    """Whether `run.schedule_step` has moved it."""

    @staticmethod
    def of(
        given: str | MakeScheduler,
        every: str,
        optimizer: Optimizer,
        steps: int | None,
        epochs: int | None,
    ) -> Schedule:
        """What `schedule=` and `schedule_every=` ask for; refuses what contradicts itself.

        `steps`, `epochs`: how many there will be; None where nobody knows.
        """
        named = isinstance(given, str)
        if (
            every == "call"
            and isinstance(given, str)
            and learning_rate.TABLE.look_up(parse_choice(given, "schedule").name).ends
        ):
            raise ConfigError(
                f"schedule='{given}' ends with the last step, and nobody knows how often run.schedule_step will be "
                "called; use schedule_every='step' or 'epoch', or another schedule."
            )
        made = make_scheduler(given, optimizer, epochs if every == "epoch" else steps)
        assert made is not None
        if isinstance(made, ReduceLROnPlateau):
            if every == "epoch":
                raise ConfigError(
                    "schedule_every='epoch' with a plateau: it follows a number, and an epoch has none of its own; use "
                    "schedule_every='call' and run.schedule_step(metric) after each epoch."
                )
            # One of the user's own is for a number that the user has measured: the loss of a step is noise.
            every = every if named else "call"
        return Schedule(made, every)

    def after_step(self, loss: float, epochs: int, skipped: bool) -> None:
        """A training step is done, and with it so many epochs have ended."""
        if self.every == "epoch":
            for _ in range(epochs):
                self.scheduler.step()
        elif self.every == "step" and not skipped:
            advance(self.scheduler, loss)

    def catch_up(self, steps: int) -> None:
        """Pass over steps that other workers have done. One that follows the loss stays: it has not seen theirs."""
        if self.every == "step" and not isinstance(self.scheduler, ReduceLROnPlateau):
            for _ in range(steps):
                self.scheduler.step()

    def step(self, metric: float | None) -> None:
        """Move now, because the user says so."""
        name = type(self.scheduler).__name__
        if self.every != "call":
            raise ConfigError(
                f"run.schedule_step: {name} moves after each {self.every} by itself; give schedule_every='call'."
            )
        self.called = True
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if metric is None:
                raise ConfigError(
                    f"run.schedule_step: {name} follows a number; give it, as run.schedule_step(loss)."
                )
            self.scheduler.step(metric)
            return
        if metric is not None:
            raise ConfigError(
                f"run.schedule_step({metric:g}): {name} follows no number; call run.schedule_step()."
            )
        self.scheduler.step()

    @property
    def waits(self) -> str:
        """What to say where a whole run has gone by without a call; empty if nothing is wrong."""
        if self.every != "call" or self.called:
            return ""
        return (
            f"the learning rate has not moved: {type(self.scheduler).__name__} waits for run.schedule_step, which was "
            "not called"
        )

    def state(self) -> dict[str, object]:
        """Where it stands, in values that JSON can hold."""
        return schedule_state(self.scheduler)

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on where another of its kind stood."""
        restore_schedule(self.scheduler, state)


def check_every(every: str, given: str | MakeScheduler | None) -> None:
    """Refuse a word that is none, or one without a schedule."""
    if every not in EVERY:
        raise ConfigError(f"schedule_every='{every}'; it is 'step', 'epoch' or 'call'.")
    if every != "step" and given is None:
        raise ConfigError(f"schedule_every='{every}' without a schedule; give schedule=, or leave it out.")
