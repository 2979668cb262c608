"""When a run has learned what it will learn: early stopping, and the best value so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError

MODES = ("min", "max")


@dataclass(frozen=True)
class EarlyStopRule:
    """What to watch, and how long to wait for it to improve."""

    watch: str
    """The name of a value that the user gives to `run.log` or `run.best`."""
    patience: int = 3
    """The run stops when so many values in a row were no better than the best before them."""
    mode: str = "min"
    delta: float = 0.0
    """A value is better only if it is better by more than this."""

    def __post_init__(self) -> None:
        check_mode("early_stop", self.mode)
        if self.patience < 1 or self.delta < 0:
            raise ConfigError(
                f"early_stop: patience={self.patience}, delta={self.delta:g}; patience is at least 1, and delta not "
                "below 0."
            )


class EarlyStop:
    """The values of one name, and whether they still improve.

    >>> stop = EarlyStop.of("val_loss, patience=2")
    >>> for step, value in enumerate([3.0, 2.0, 2.5, 2.2]):
    ...     stop.observe("val_loss", value, step)
    >>> stop.stopped, stop.reason
    (True, 'val_loss has not been below 2 for 2 values')
    """

    def __init__(self, rule: EarlyStopRule) -> None:
        self.rule = rule
        self._best: float | None = None
        self._worse = 0
        self._step = -1

    @staticmethod
    def of(text: str | None) -> EarlyStop | None:
        """From what a user writes: "val_loss, patience=3, mode=max"."""
        if text is None:
            return None
        return EarlyStop(fill_options(parse_choice(f"early_stop({text})", "early_stop"), EarlyStopRule))

    def observe(self, name: str, value: float, step: int) -> None:
        """A value of that name after so many steps. A step counts once, though log and best may both tell of it."""
        if name != self.rule.watch or step == self._step:
            return
        self._step = step
        if is_better(value, self._best, self.rule.mode, self.rule.delta):
            self._best = value
            self._worse = 0
        else:
            self._worse += 1

    @property
    def seen(self) -> bool:
        """Whether there has been any value."""
        return self._step >= 0

    @property
    def stopped(self) -> bool:
        return self._worse >= self.rule.patience

    @property
    def reason(self) -> str:
        """Why the run stops."""
        side = "below" if self.rule.mode == "min" else "above"
        best = "anything finite" if self._best is None else f"{self._best:g}"
        return f"{self.rule.watch} has not been {side} {best} for {self._worse} values"

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"rule": asdict(self.rule), "best": self._best, "worse": self._worse, "step": self._step}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; what was measured by another rule does not count."""
        if state is None or {**state["rule"], "patience": 0} != {**asdict(self.rule), "patience": 0}:
            return
        self._best = state["best"]
        self._worse = state["worse"]
        self._step = state["step"]


@dataclass(frozen=True)
class Best:
    """The value by which the checkpoint `best` was the best so far."""

    name: str
    value: float
    mode: str
    step: int


def check_mode(who: str, mode: str) -> None:
    """Refuse a word that is none."""
    if mode not in MODES:
        raise ConfigError(f"{who}: mode='{mode}'; it is 'min' or 'max'.")


def is_better(value: float, best: float | None, mode: str, delta: float = 0.0) -> bool:
    """Whether a value beats the best one before it; what is not finite beats nothing.

    >>> is_better(0.5, None, "min"), is_better(0.5, 0.5, "min"), is_better(0.6, 0.5, "max")
    (True, False, True)
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - delta if mode == "min" else value > best + delta
