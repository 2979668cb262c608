"""What a server hands to the one after it: operations in their order, again until they are confirmed. Sans I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.server.message import Message

RESEND = 0.25
"""Seconds after which what the next server has not confirmed goes to it again."""
RESEND_SNAPSHOT, SLOWEST = 3.0, 20e6
"""A snapshot goes out again after this time; and for both, the time they take at so many bytes a second."""
_WINDOW = 64
"""Operations that are on their way at a time."""


@dataclass
class Handover:
    """The log between a server and the next one, by place."""

    log: dict[int, Message] = field(default_factory=dict)
    """What has been applied here and is not known to be held there."""
    confirmed: int = 0
    """Up to here, the next server holds everything."""
    passed: int = 0
    """Up to here, it has been sent everything."""
    due: float = 0.0
    """When what is not confirmed goes out again."""
    open: bool = False
    """Whether the next server has a state to apply operations to; until then they wait."""
    snapshot_sent: float | None = None
    """When a snapshot went there that has not been confirmed."""

    @property
    def nbytes(self) -> int:
        """Of the log's numbers."""
        return sum(m.tensor.nbytes for m in self.log.values() if m.tensor is not None)

    def begin(self, place: int) -> None:
        """For another server, which has nothing and gets a snapshot of this place or a later one."""
        self.log.clear()
        self.confirmed = self.passed = place
        self.open, self.snapshot_sent = False, None

    def confirm(self, place: int) -> None:
        """The next server holds everything up to here."""
        if not self.open:
            self.open, self.snapshot_sent = True, None
            self.passed = place
        self.confirmed = max(self.confirmed, place)
        self.passed = max(self.passed, place)
        for at in [at for at in self.log if at <= place]:
            del self.log[at]

    def rewind(self) -> None:
        """What is not confirmed goes out again."""
        self.passed = self.confirmed

    def outgoing(self, now: float) -> Iterator[Message]:
        """What should be sent now."""
        if self.open:
            while self.passed + 1 in self.log and self.passed - self.confirmed < _WINDOW:
                self.passed += 1
                self.due = now + RESEND + self.nbytes / SLOWEST
                yield self.log[self.passed]

    def sent_snapshot(self, nbytes: int, now: float) -> None:
        """A snapshot is on its way."""
        self.open, self.snapshot_sent = False, now
        self.due = now + RESEND_SNAPSHOT + nbytes / SLOWEST
