"""`strategy="auto"`: what stands in its brackets, and what was chosen before."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config import fill_options, parse_strategy
from shoal.errors import ConfigError
from shoal.plan.cache import keep, machine_key, recall

NAME = "auto"
FILE = "choices"


@dataclass(frozen=True)
class AutoOptions:
    """What stands in the brackets of `auto(...)`."""

    tries: int = 2
    """So many of the best plans are tried before one is chosen; 0 and 1 try none."""
    steps: int = 10
    """Steps of each try."""
    replan: bool = False
    """Whether to plan anew where a choice for this model on this machine is remembered."""


def automatic_options(text: str) -> AutoOptions | None:
    """The options of a strategy that is to be chosen; None of one that is given.

    >>> automatic_options("auto(tries=3)"), automatic_options("ddp")
    (AutoOptions(tries=3, steps=10, replan=False), None)
    """
    plan = parse_strategy(text)
    if plan.exchange.name != NAME:
        return None
    if plan.tensor is not None or plan.pipeline is not None or plan.compressor is not None:
        raise ConfigError(
            f"{plan}: auto chooses all parts of a strategy itself; write auto alone, or no auto."
        )
    options = fill_options(plan.exchange, AutoOptions)
    if options.tries < 0 or options.steps < 1:
        raise ConfigError(f"{plan}: tries is 0 or more, and steps 1 or more.")
    return options


def remembered(model: str, workers: int) -> str | None:
    """What was chosen for this model on this machine."""
    found = recall(FILE, _key(model, workers)).get("strategy")
    return found if isinstance(found, str) else None


def remember(model: str, workers: int, strategy: str) -> None:
    """Keep a choice."""
    keep(FILE, _key(model, workers), {"strategy": strategy})


def _key(model: str, workers: int) -> str:
    return f"{machine_key()}-{model}-{workers}"
