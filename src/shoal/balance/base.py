"""The contract of a balance: from measurements of all workers to what each of them gets of the next steps.

A choice is a frozen dataclass of its options. `start` makes a `Sharer`, which holds what has been learned so far. Both
are pure: no processes, no clock, no files. Every worker feeds its own sharer with the numbers of all workers and must
come to the same shares, so nothing here depends on more than those numbers. Sums are exact (`math.fsum`), and there is
no logarithm or exponential, which two machines may round differently.

Shares are whole numbers: a step is dealt out in units. A unit is a sample, or one for each micro-batch of a worker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.balance.deal import deal
from shoal.errors import ConfigError
from shoal.types import Promise

LARGEST = 1e6
"""The largest share that may be given, as in a partition."""


@dataclass(frozen=True)
class Basis:
    """The units of a step to share, and what is known of the workers."""

    workers: int
    units: int
    """A step is dealt out in so many equal portions; every worker gets at least one."""
    lag: int = 0
    """So many steps pass before new shares act, because their batches are prepared already."""
    known: tuple[float, ...] = ()
    """Speeds from before this run, in any unit; empty: nothing is known."""
    most: tuple[float, ...] = ()
    """Units that each worker may get at most; empty: no limit."""


class Sharer(ABC):
    """What has been learned of the workers so far, and what each gets for it."""

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        self.most = basis.most or (math.inf,) * basis.workers
        """Units that each may get at most."""
        self.shares: tuple[int, ...] = deal(basis.known or (1.0,) * basis.workers, basis.units, self.most)
        """Units of each worker in the next step."""
        self.speeds: tuple[float, ...] = basis.known
        """Units a second of each, or in any other unit; empty while they are not known."""

    @property
    def window(self) -> int:
        """After so many more steps it wants to hear of them; 0: never."""
        return 0

    def limit(self, most: Sequence[float]) -> None:
        """Let no worker get more units than this, from the next decision on."""
        self.most = tuple(most)

    @abstractmethod
    def observe(self, units: Sequence[float], seconds: Sequence[float]) -> None:
        """One step: how much each worker had of it, and how long it took it without waiting for others."""


class Fixed(Sharer):
    """Shares that stay what they are."""

    def observe(self, units: Sequence[float], seconds: Sequence[float]) -> None:
        del units, seconds


class Balance(ABC):
    """From measurements to shares."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    remembers: ClassVar[bool] = False
    """Whether speeds are kept from run to run."""
    divides_stages: ClassVar[bool] = True
    """Whether it can say how large the stages of a pipeline are: they stay what they are in a whole run."""

    @property
    def measures(self) -> bool:
        """Whether workers are measured while they train."""
        return True

    @property
    def given(self) -> tuple[float, ...]:
        """What each worker should get, where the user has said so."""
        return ()

    @property
    def limits(self) -> tuple[float, ...]:
        """Samples that each worker may get at most: one number for each, or one for all; empty: no limit was given."""
        return ()

    @abstractmethod
    def start(self, basis: Basis) -> Sharer:
        """Before the first step."""


def read_numbers(what: str, text: str, least: float) -> tuple[float, ...]:
    """Numbers joined by "/".

    >>> read_numbers("shares", "3/1", 1e-6)
    (3.0, 1.0)
    """
    try:
        numbers = tuple(float(word) for word in text.split("/")) if text else ()
    except ValueError:
        numbers = (math.nan,)
    if not all(least <= number <= LARGEST for number in numbers):
        raise ConfigError(
            f"{what}={text}: give each worker a number from {least:g} to {LARGEST:g}, joined by '/', as in {what}=2/1."
        )
    return numbers
