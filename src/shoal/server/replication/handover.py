"""What a server hands to the one after it: operations in their order, again until they are confirmed. Sans I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.server.protocol.messages import Message

RESEND = 0.25
"""Seconds after which what the next server has not confirmed goes to it again."""
RESEND_SNAPSHOT = 3.0
"""Seconds after which a snapshot goes out again."""
SLOWEST = 20e6
"""Bytes a second: what is sent again gets the time that it takes at this rate on top."""
_WINDOW = 64
"""Operations that are on their way at a time."""


@dataclass
class Handover:
    """The log between a server and the next one, by place."""

    log: dict[int, Message] = field(default_factory=dict)
    """What has been applied here and is not known to be held there, in its order."""
    nbytes: int = 0
    """Bytes of the tensors in the log."""
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

    def begin(self, place: int) -> None:
        """For another server, which has nothing and gets a snapshot of this place or a later one."""
        self.log.clear()
        self.nbytes = 0
        self.confirmed = place
        self.passed = place
        self.open = False
        self.snapshot_sent = None

    def add(self, message: Message) -> None:
        """The next operation."""
        self.log[message.place] = message
        self.nbytes += _size(message)

    def confirm(self, place: int) -> None:
        """The next server holds everything up to here."""
        if not self.open:
            self.open = True
            self.snapshot_sent = None
            self.passed = place
        self.confirmed = max(self.confirmed, place)
        self.passed = max(self.passed, place)
        # The log is in order of places (dicts keep insertion order), so what is confirmed is a prefix of it.
        while self.log and (first := next(iter(self.log))) <= place:
            self.nbytes -= _size(self.log.pop(first))

    def rewind(self) -> None:
        """Send everything again that is not confirmed."""
        self.passed = self.confirmed

    def outgoing(self, now: float) -> list[Message]:
        """What should be sent now."""
        found = []
        # A window: `rewind` sends all of it again, and a slow server must not be buried under repetitions.
        while self.open and self.passed + 1 in self.log and self.passed - self.confirmed < _WINDOW:
            self.passed += 1
            found.append(self.log[self.passed])
        if found:
            places = range(self.confirmed + 1, self.passed + 1)
            # The resend timer allows for all unconfirmed bytes, not only for new ones: a slow link would otherwise be
            # given the same megabytes again before it had finished the first time.
            under_way = sum(_size(self.log[at]) for at in places if at in self.log)
            self.due = now + RESEND + under_way / SLOWEST
        return found

    def sent_snapshot(self, nbytes: int, now: float) -> None:
        """A snapshot is on its way."""
        self.open = False
        self.snapshot_sent = now
        self.due = now + RESEND_SNAPSHOT + nbytes / SLOWEST


def _size(message: Message) -> int:
    return 0 if message.tensor is None else message.tensor.nbytes
