"""The contract of a clock: which steps may begin, and whether the parts of a step make one update.

The [ledger](../server/ledger/ledger_machine.py) asks the clock before it grants a claim, and tells it what came of
each: so a clock may adapt. The ledger is replicated, and every copy of it runs a copy of the clock. A clock may
therefore use nothing but what it is told here, in the order in which it is told: no time, no randomness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from shoal.types import Choice, Promise


@dataclasses.dataclass(eq=False)
class Clock:
    """How stale a worker's parameters may be. Each choice is a dataclass of its own options."""

    promise: ClassVar[Promise] = Promise.CONVERGES
    summary: ClassVar[str]
    together: ClassVar[bool] = False
    """True if all parts of a step make one update; False if each part makes one as soon as it is there.

    A clock with `together` lets only the oldest step begin.
    """

    @property
    def bound(self) -> int | None:
        """No claim is ever granted further ahead of the oldest step than so many steps; None: there is no bound."""
        raise NotImplementedError

    def may_begin(self, step: int, oldest: int) -> bool:
        """Whether parts of `step` may be claimed while `oldest` is the first step that is not over.

        Workers ask a clock of their own, which is told nothing, whether values that they hold are fresh enough: so a
        new clock allows no more than it will after any events.
        """
        return self.bound is None or step - oldest <= self.bound

    def granted(self, ahead: int) -> None:
        """A claim was granted, so many steps ahead of the oldest."""

    def refused(self) -> None:
        """A claim was not granted because of `may_begin`: its worker waits."""

    def finished(self) -> None:
        """The oldest step is over, and the next is the oldest."""

    def state(self) -> list[int]:
        """What the clock has learnt, for copies of the ledger."""
        return []

    def restore(self, state: Sequence[int]) -> None:
        """Continue from what `state` gave, with the same options."""

    def __str__(self) -> str:
        """The clock as a strategy writes it, which `make_clock` reads: `ssp(4)`."""
        options = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        return str(Choice(type(self).__name__.lower(), options))
