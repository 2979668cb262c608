"""Optimizers for rows: the update of those rows that have a gradient, with the state of each row beside it.

The settings mean what they mean to torch, and for a table whose every row has a gradient in every step the result is
torch's. Rows without a gradient stay as they are: their momentum does not decay, weight decay does not reach them,
and each row counts its own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.server.protocol.state_machine import Refused

Settings = Mapping[str, Any]
"""Settings of one group, by torch's own names; those that an update computes with are checked to be numbers."""
State = Mapping[str, torch.Tensor]
"""By torch's own names: [n, dim] each."""

STEP = "step"
_FIRST = "initial_accumulator_value"


@dataclass(frozen=True)
class Rule:
    """How one kind of optimizer updates rows."""

    state: Callable[[Settings], tuple[str, ...]]
    """The names of its state for these settings, each as wide as a row."""
    update: Callable[[torch.Tensor, torch.Tensor, State, torch.Tensor, Settings], None]
    """Rows, their gradient, their state, how many steps each has done before, settings. Rows and state change in
    place; the gradient may be used up."""


@dataclass(frozen=True)
class RowOptimizer:
    """A rule with its settings."""

    kind: str
    settings: Settings
    state: tuple[str, ...]

    @classmethod
    def of(cls, description: object) -> RowOptimizer:
        """From its description: {"kind": "AdamW", "groups": [{"lr": 0.001, ...}]}."""
        kind, groups = description, None
        if isinstance(description, dict) and isinstance(description.get("groups"), list):
            kind, groups = description.get("kind"), description["groups"]
        if groups is None or not isinstance(kind, str) or kind not in RULES:
            raise Refused(
                f"{kind} has no rule for single rows; use {', '.join(RULES)} for a model with a SparseEmbedding."
            )
        settings = _checked(kind, groups)
        return cls(kind, settings, RULES[kind].state(settings))

    def with_settings(self, groups: object) -> RowOptimizer:
        """This optimizer with other settings, as a schedule changes them; they may not need state that is not there."""
        checked = _checked(self.kind, groups)
        missing = set(RULES[self.kind].state(checked)) - set(self.state)
        if missing:
            raise Refused(
                f"the new settings of {self.kind} need {', '.join(sorted(missing))}, which the rows were made "
                "without; set them so from the first step on."
            )
        return RowOptimizer(self.kind, checked, self.state)

    def update(
        self,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        steps: torch.Tensor,
        share: float = 1.0,
    ) -> None:
        """One step on rows with a gradient, in place; the learning rate counts by `share`.

        `steps`, [n], are the steps that each row has done before. The gradient is used up.
        """
        settings = {**self.settings, "lr": self.settings["lr"] * share}
        if settings.get("maximize"):
            gradient.neg_()
        RULES[self.kind].update(rows, gradient, state, steps, settings)


def _sgd(rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings) -> None:
    _add_decay(gradient, rows, s)
    momentum = s.get("momentum", 0)
    dampening = s.get("dampening", 0)
    if momentum:
        average = state["momentum_buffer"]
        average.mul_(momentum)
        if dampening:  # the first momentum is the gradient itself
            average.add_(gradient * (1 - dampening * (steps != 0).to(rows.dtype)).unsqueeze(1))
        else:
            average.add_(gradient)
        gradient = gradient.add_(average, alpha=momentum) if s.get("nesterov") else average
    rows.add_(gradient, alpha=-s["lr"])


def _adagrad(
    rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings
) -> None:
    _add_decay(gradient, rows, s)
    total = state["sum"]
    if s.get(_FIRST, 0):
        total[steps == 0] = s[_FIRST]
    total.addcmul_(gradient, gradient)
    below = total.sqrt().add_(s.get("eps", 1e-10))
    if s.get("lr_decay", 0):
        gradient.mul_((1.0 / (1.0 + steps.double() * s["lr_decay"])).to(rows.dtype).unsqueeze(1))
    rows.addcdiv_(gradient, below, value=-s["lr"])


def _adam(rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings) -> None:
    if s.get("decoupled_weight_decay"):
        _adamw(rows, gradient, state, steps, s)
        return
    _add_decay(gradient, rows, s)
    _adam_step(rows, gradient, state, steps, s)


def _adamw(
    rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings
) -> None:
    if s.get("weight_decay", 0):
        rows.mul_(1 - s["lr"] * s["weight_decay"])
    _adam_step(rows, gradient, state, steps, s)


def _adam_step(
    rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings
) -> None:
    first, second = s.get("betas", (0.9, 0.999))
    mean = state["exp_avg"]
    square = state["exp_avg_sq"]
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    if s.get("amsgrad"):
        square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
    # Each row has its own count of steps, and so its own corrections; in double, as torch computes its one.
    done = steps.double() + 1
    scale = (s["lr"] / (1 - first**done)).to(rows.dtype).unsqueeze(1)
    root = (1 - second**done).sqrt_().to(rows.dtype).unsqueeze(1)
    # In the memory of the gradient, which is used up.
    below = torch.sqrt(square, out=gradient).div_(root).add_(s.get("eps", 1e-8))
    rows.sub_(torch.div(mean, below, out=below).mul_(scale))


def _rmsprop(
    rows: torch.Tensor, gradient: torch.Tensor, state: State, steps: torch.Tensor, s: Settings
) -> None:
    del steps
    _add_decay(gradient, rows, s)
    alpha = s.get("alpha", 0.99)
    momentum = s.get("momentum", 0)
    square = state["square_avg"]
    square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    if s.get("centered"):
        mean = state["grad_avg"].lerp_(gradient, 1 - alpha)
        below = square.addcmul(mean, mean, value=-1).sqrt_()
    else:
        below = square.sqrt()
    below.add_(s.get("eps", 1e-8))
    if momentum:
        average = state["momentum_buffer"].mul_(momentum).addcdiv_(gradient, below)
        rows.add_(average, alpha=-s["lr"])
    else:
        rows.addcdiv_(gradient, below, value=-s["lr"])


def _add_decay(gradient: torch.Tensor, rows: torch.Tensor, s: Settings) -> None:
    if s.get("weight_decay", 0):
        gradient.add_(rows, alpha=s["weight_decay"])


def _sgd_state(s: Settings) -> tuple[str, ...]:
    return ("momentum_buffer",) if s.get("momentum", 0) else ()


def _adagrad_state(s: Settings) -> tuple[str, ...]:
    del s
    return ("sum",)


def _adam_state(s: Settings) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if s.get("amsgrad") else ()))


def _rmsprop_state(s: Settings) -> tuple[str, ...]:
    wanted = {
        "square_avg": True,
        "grad_avg": s.get("centered", False),
        "momentum_buffer": s.get("momentum", 0),
    }
    return tuple(name for name, needed in wanted.items() if needed)


RULES = {
    "SGD": Rule(_sgd_state, _sgd),
    "Adagrad": Rule(_adagrad_state, _adagrad),
    "Adam": Rule(_adam_state, _adam),
    "AdamW": Rule(_adam_state, _adamw),
    "RMSprop": Rule(_rmsprop_state, _rmsprop),
}
"""By the name of torch's class."""


def _checked(kind: str, groups: object) -> Settings:
    """The settings of the one group, from outside, with the numbers that a rule computes with looked at."""
    if not isinstance(groups, list | tuple) or len(groups) != 1:
        raise Refused(
            f"the rows of a table share one group of settings of {kind}, and {groups!r} came; give one."
        )
    (settings,) = groups
    if not isinstance(settings, dict) or not _is_number(settings.get("lr")):
        raise Refused(
            f"the settings of {kind} need a learning rate lr that is a number; they are {settings!r}."
        )
    numbers = ("momentum", "dampening", "weight_decay", "eps", "alpha", "lr_decay", _FIRST)
    for name in numbers:
        if not _is_number(settings.get(name, 0)):
            raise Refused(f"{kind}: {name} is {settings[name]!r}; give a number.")
    betas = settings.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2 or not all(_is_number(b) for b in betas):
        raise Refused(f"{kind}: betas are {betas!r}; give two numbers.")
    return dict(settings)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
