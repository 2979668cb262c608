"""What workers and ledger agree on before the first claim: how much work a step is, and by which clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from shoal.clock import clock_at, make_clock
from shoal.clock.base import Clock
from shoal.errors import ConfigError
from shoal.server.protocol.state_machine import Refused, natural

_LONGEST = 200
"""Characters in the text of a clock; what is longer was not written by a worker."""


class TermsMessage(TypedDict):
    """Terms as they travel."""

    parts: int
    clocks: list[tuple[int, str]]
    """(first step, the clock as a strategy writes it)"""
    backup: int


@dataclass(frozen=True)
class WorkTerms:
    """The terms of a job's work."""

    parts: int
    """Parts of a step: one for each worker."""
    clocks: Sequence[tuple[int, Clock]]
    """(first step, clock), the first from step 0 on."""
    backup: int = 0
    """So many parts of a step need not be waited for, where its parts make one update."""

    @classmethod
    def of(cls, message: TermsMessage) -> WorkTerms:
        """Terms from what a worker has sent; Refused says what is wrong with them."""
        parts = natural(message["parts"], "the number of workers")
        backup = natural(message["backup"], "backup")
        if backup >= parts:
            raise Refused(f"backup={backup} leaves none of {parts} workers to wait for.")
        clocks = [
            (natural(begin, "the first step of a clock"), _clock(text)) for begin, text in message["clocks"]
        ]
        begins = [begin for begin, _ in clocks]
        if begins[:1] != [0] or begins != sorted(set(begins)):
            raise Refused(
                f"clocks begin at steps {begins}; the first begins at step 0, each later one after it."
            )
        return cls(parts, clocks, backup)

    def message(self) -> TermsMessage:
        """These terms as a plain value."""
        texts = [(begin, str(clock)) for begin, clock in self.clocks]
        return {"parts": self.parts, "clocks": texts, "backup": self.backup}

    def clock(self, step: int) -> Clock:
        """The clock of a step."""
        return clock_at(self.clocks, step)

    @property
    def together(self) -> bool:
        """Whether the parts of a step make one update in all steps."""
        return all(clock.together for _, clock in self.clocks)

    def __str__(self) -> str:
        """For a sentence in which two workers disagree."""
        clocks = ", ".join(
            f"{clock} from step {begin} on" if begin else str(clock) for begin, clock in self.clocks
        )
        return f"{self.parts} workers and clock {clocks}" + (
            f" (backup={self.backup})" if self.backup else ""
        )


def _clock(text: object) -> Clock:
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise Refused("a clock is a short text, as in ssp(4).")
    try:
        return make_clock(text)
    except ConfigError as reason:
        raise Refused(str(reason)) from None
