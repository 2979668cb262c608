"""One shard on one server: its machine, the log that replicates it, and its place in the chain.

Chain replication (van Renesse, Schneider, OSDI 2004). The head gives each operation its place in the log and applies
it; every server passes it to the next; the last one sends back that everything up to there is held by all. Only then
does the head answer the client. Reads go to the last server, which knows only what all hold.

    client -> head  CALL      head -> ... -> tail  FORWARD      tail -> ... -> head  COMMIT      head -> client  REPLY

Exactly once: each client numbers its calls to a shard, one after the other, and what the last of them gave is part of
the replicated state. A call that comes again, to whichever server is the head by then, finds its answer there.
Messages may be lost, doubled and come in any order: what is not confirmed is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.server.machine import Answer, Machine, Operation, Refused
from shoal.server.message import Kind, Message
from shoal.server.view import View

Send = Callable[[int, Message], None]

RESEND = 0.25
"""Seconds after which what the next server has not confirmed goes to it again."""
RESEND_SNAPSHOT, SLOWEST = 3.0, 20e6
"""A snapshot goes out again after this time, and the time it takes at so many bytes a second."""
_TOGETHER = 16
"""How many operations are sent again at a time."""

OK, REFUSED = 0, 1
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What a machine stumbles over if a client sends other arguments than it should. All copies stumble alike."""


@dataclass
class Session:
    """The last call of one client."""

    seq: int
    place: int
    status: int
    value: Any


@dataclass
class Chain:
    """A shard as this server has it. Every method may send."""

    me: int
    shard: int
    machine: Machine
    send: Send
    view: View = field(default_factory=View)
    whole: bool = False
    """Whether the state is here: not yet, where a snapshot is to come."""
    last: int = 0
    """The place of the last operation applied here."""
    committed: int = 0
    """Up to here, everybody holds everything."""
    log: dict[int, Message] = field(default_factory=dict)
    """What has been applied here and is not known to be held by all, by place."""
    sessions: dict[int, Session] = field(default_factory=dict)
    parked: dict[tuple[int, int], Message] = field(default_factory=dict)
    """Questions that cannot be answered yet, by client and number."""
    sent: float = 0.0
    """When something was last sent to a neighbour that should answer it."""
    snapshot_due: float = 0.0
    """When it should have been confirmed, and goes out again."""
    snapshot_sent: float | None = None
    """When a snapshot went to the next server, which has not confirmed it."""

    # The view.

    @property
    def members(self) -> tuple[int, ...]:
        return self.view.chains[self.shard]

    @property
    def is_head(self) -> bool:
        return self.members[0] == self.me

    @property
    def is_tail(self) -> bool:
        return self.members[-1] == self.me

    @property
    def before(self) -> int:
        return self.members[self.members.index(self.me) - 1]

    @property
    def after(self) -> int:
        return self.members[self.members.index(self.me) + 1]

    def change_view(self, view: View, now: float) -> None:
        """Take the place that a new view gives this server; its chain has this server in it."""
        before = self.members if self.view.chains else ()
        self.view = view
        self.parked.clear()  # those who asked will ask again, whoever the last server is now
        self.snapshot_sent, self.sent = None, now
        if self.is_tail:
            self._commit(self.last)
            return
        if self.after not in before:
            self._send_snapshot(now)
        else:
            self.send_log(now)

    # What comes in.

    def on_call(self, source: int, message: Message, now: float) -> None:
        """A client wants something done."""
        if not self.is_head or not self.whole:
            return
        session = self.sessions.get(message.client)
        if session is not None and message.seq <= session.seq:
            if message.seq == session.seq and session.place <= self.committed:
                self._reply(message.client, session)
            return  # otherwise it is under way, or long answered
        del source
        self._take(replace(message, kind=Kind.FORWARD, place=self.last + 1), now)

    def on_forward(self, message: Message, now: float) -> None:
        """The server before this one passes an operation on."""
        if not self.whole or message.place > self.last + 1:
            return  # what is missing will come again
        if message.place == self.last + 1:
            self._take(message, now)
        elif self.committed:
            self.send(self.before, self._message(Kind.COMMIT, place=self.committed))

    def on_commit(self, message: Message, now: float) -> None:
        """The server after this one knows that all hold everything up to a place."""
        if (
            self.snapshot_sent is not None
        ):  # the one after this one has its snapshot, and needs what came since
            self.snapshot_sent = None
            self._commit(min(message.place, self.last))
            self.send_log(now)
        else:
            self._commit(min(message.place, self.last))

    def on_ask(self, source: int, message: Message) -> None:
        """A client wants to know something."""
        if self.is_tail:
            self.parked[source, message.seq] = message
            self._answer(source, message.seq)

    def on_snapshot(self, message: Message, now: float) -> bool:
        """Become what the server before this one is; True if this one is whole now and was not.

        Without a tensor it is a request: the next server has no state.
        """
        if message.tensor is None:
            if not self.is_tail and (
                self.snapshot_sent is None or now - self.snapshot_sent >= RESEND_SNAPSHOT
            ):
                self._send_snapshot(now)
            return False
        came = not self.whole
        if came:
            value, sessions = message.meta
            self.machine.restore(value, message.tensor)
            self.sessions = {client: Session(*fields) for client, *fields in sessions}
            self.last, self.whole = message.place, True
            self.log.clear()
        if self.is_tail:
            self._commit(self.last)
        self.send(self.before, self._message(Kind.COMMIT, place=self.committed))
        return came

    def on_time(self, now: float) -> None:
        """Send again what is not confirmed."""
        if not self.whole:
            if not self.is_head and now - self.sent >= RESEND_SNAPSHOT:
                self.send(self.before, self._message(Kind.SNAPSHOT))
                self.sent = now
            return
        if self.is_tail:
            return
        if self.snapshot_sent is not None:
            if now >= self.snapshot_due:
                self._send_snapshot(now)
        elif self.log and now - self.sent >= RESEND:
            self.send_log(now)

    # What it does.

    def _take(self, message: Message, now: float) -> None:
        if not self.is_tail:  # the others work on it while this one does
            self.log[message.place] = message
            if self.snapshot_sent is None:
                self.send(self.after, replace(message, epoch=self.view.epoch))
                self.sent = now
        name, args = message.meta
        op = Operation(name, message.clock, args, message.tensor, message.client, message.codec)
        try:
            status, value = OK, self.machine.apply(op).value
        except Refused as reason:
            status, value = REFUSED, str(reason)
        except MALFORMED as error:
            status, value = REFUSED, f"{name} with wrong arguments: {error!r}"
        self.last = message.place
        self.sessions[message.client] = Session(message.seq, message.place, status, value)
        if self.is_tail:
            self._commit(self.last)

    def _commit(self, place: int) -> None:
        if place > self.committed:
            for at in range(self.committed + 1, place + 1):
                self.log.pop(at, None)
            newly = [
                (client, session)
                for client, session in self.sessions.items()
                if self.committed < session.place <= place
            ]
            self.committed = place
            if self.is_head:
                for client, session in newly:
                    self._reply(client, session)
        if not self.is_head and self.committed:
            self.send(self.before, self._message(Kind.COMMIT, place=self.committed))
        if self.is_tail:
            for client, seq in list(self.parked):
                self._answer(client, seq)

    def _answer(self, client: int, seq: int) -> None:
        if not self.whole:
            return
        message = self.parked[client, seq]
        name, args = message.meta
        op = Operation(name, message.clock, args, message.tensor, message.client)
        try:
            found = self.machine.answer(op)
        except Refused as reason:
            status, found = REFUSED, Answer(str(reason))
        except MALFORMED as error:
            status, found = REFUSED, Answer(f"{name} with wrong arguments: {error!r}")
        else:
            status = OK
        if found is not None:
            del self.parked[client, seq]
            meta, where = [status, found.value], found.where
            reply = self._message(Kind.REPLY, client=client, seq=seq, meta=meta)
            self.send(client, replace(reply, tensor=found.tensor, where=where))

    def _reply(self, client: int, session: Session) -> None:
        meta = [session.status, session.value]
        self.send(client, self._message(Kind.REPLY, client=client, seq=session.seq, meta=meta))

    def send_log(self, now: float) -> None:
        """To the next server: what it has not confirmed."""
        for place in sorted(self.log)[:_TOGETHER]:
            self.send(self.after, replace(self.log[place], epoch=self.view.epoch))
        self.sent = now

    def _send_snapshot(self, now: float) -> None:
        if not self.whole:
            return
        value, tensor = self.machine.snapshot()
        sessions = [[c, s.seq, s.place, s.status, s.value] for c, s in self.sessions.items()]
        message = self._message(Kind.SNAPSHOT, place=self.last, meta=[value, sessions])
        self.send(self.after, replace(message, tensor=tensor))
        self.snapshot_sent = self.sent = now
        self.snapshot_due = now + RESEND_SNAPSHOT + tensor.nbytes / SLOWEST

    def _message(
        self, kind: Kind, place: int = 0, client: int = 0, seq: int = 0, meta: Any = None
    ) -> Message:
        return Message(kind, self.view.epoch, self.shard, client, seq, place, meta=meta)
