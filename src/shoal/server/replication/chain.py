"""One shard on one server: its machine, the log that replicates it, and its place in the chain.

Chain replication (van Renesse, Schneider, OSDI 2004). The head gives each operation its place in the log and applies
it; every server passes it to the next; the last one sends back that everything up to there is held by all. Only then
does the head answer the client. Reads go to the last server, which knows only what all hold.

    client -> head  CALL      head -> ... -> tail  FORWARD      tail -> ... -> head  COMMIT      head -> client  REPLY

Exactly once: each client numbers its calls to a shard, one after the other, and what the last of them gave is part of
the replicated state. A call that comes again, to whichever server is the head by then, finds its answer there.
Messages may be lost, doubled and come in any order: what is not confirmed is sent again.

A newcomer gets a snapshot of the tail, and then what is done to the shard, while nobody waits for it. When it has
caught up, a view makes it the tail. In that view the one before it says up to which place others have been answered,
and only with all of that is the newcomer whole: it answers no question and counts for nothing before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.server.protocol.messages import Message, MessageKind, Send
from shoal.server.protocol.session import Session, attempt
from shoal.server.protocol.state_machine import Machine
from shoal.server.protocol.view import ChainPosition, View
from shoal.server.replication.handover import RESEND, RESEND_SNAPSHOT, Handover

_NEAR = 16
"""A newcomer has caught up if it lacks no more operations than this."""
_ROOM = 4
"""The log for a newcomer may take so many times less bytes than its snapshot; then everybody waits for it."""


@dataclass
class Chain:
    """A shard as this server has it. Every method may send."""

    me: int
    shard: int
    machine: Machine
    send: Send
    epoch: int = 0
    at: ChainPosition = field(default_factory=ChainPosition)
    whole: bool = False
    """Whether all that others have been answered is here."""
    filled: bool = False
    """Whether a snapshot is here, and what the server before this one has sent since."""
    last: int = 0
    """The place of the last operation applied here."""
    committed: int = 0
    """Up to here, everybody holds everything."""
    handover: Handover = field(default_factory=Handover)
    """Operations sent to the next server and not yet confirmed by it."""
    log_limit: float = 0.0
    """Bytes that the log may take."""
    sessions: dict[int, Session] = field(default_factory=dict)
    parked: dict[tuple[int, int], Message] = field(default_factory=dict)
    """Questions that cannot be answered yet, by client and number."""
    fed_since: int = 0
    """The epoch since which the server before this one has been the same."""
    snapshot_requested: float = 0.0
    """When a snapshot was last asked for."""
    answered: int | None = None
    """Up to here others may have been answered before the next server counted, and it has not said that it has that."""

    # The view.

    @property
    def has_newcomer(self) -> bool:
        """Whether the next server is one that counts for nothing yet."""
        return self.at.is_tail and self.at.next is not None

    @property
    def caught_up(self) -> bool:
        """Whether the newcomer after this tail has nearly all that is here."""
        near = self.last - self.handover.confirmed <= _NEAR and self.handover.nbytes <= self.log_limit
        return self.has_newcomer and self.handover.open and near

    def change_view(self, view: View, now: float) -> None:
        """Take the place that a new view gives this server: in its chain, or as the newcomer."""
        old = self.at
        seen = self.epoch
        self.at = ChainPosition.of(self.me, self.shard, view)
        self.epoch = view.epoch
        # One that was left out in a view that did not get here has come anew, and has nothing.
        anew = self.at.next is not None and view.since.get(self.at.next, 0) > seen > 0
        # A handover is about one successor: another one, or the same after it was away, needs a new handover.
        other = anew or self.at.next != old.next
        self.parked.clear()  # those who asked will ask again, whoever the last server is now
        if self.at.before != old.before:
            self.fed_since = view.epoch
            self.filled = self.filled and self.whole  # what is here came from another, who may have had less
        handed = self.handover
        # As the tail this server answered clients when it alone held an operation. Its new successor may not take reads
        # before it has all of that (`answered`), or a client could read a state older than one it has seen.
        if self.at.is_tail or other:
            self.answered = None
        if old.is_tail and not self.at.is_tail:
            self.answered = self.last
        # A newcomer gets a snapshot. A server that was further down this chain moves up when the one between ended: it
        # holds at least what was committed, so the log from there is enough.
        if other and (anew or old.is_tail or self.at.is_tail):
            handed.begin(self.last)
        elif other:
            handed.open = True  # the next server has been in the chain before
            handed.confirmed = self.committed
        if self.at.is_tail:
            self._commit(self.last)
        if handed.open:
            self.send_log(now)
        elif not self.at.is_tail:
            self.send_snapshot(now)
        # Nobody before this server: it is the head, and has no one to take a state from.
        if self.at.before is not None and not self.whole:
            if self.filled:
                self._confirm()
            elif self.at.is_member:
                self._ask_for_snapshot(now)

    # What comes in.

    def on_call(self, source: int, message: Message, now: float) -> None:
        """A client wants something done."""
        # No refusal is sent: the client has an older view than this server, or a newer one, and calls again in the
        # next.
        if not self.at.is_head or not self.whole:
            return
        session = self.sessions.get(message.client)
        if session is not None and message.seq <= session.seq:
            # Before it is committed the head could end with the only copy, so even the repeated answer waits for that.
            if message.seq == session.seq and session.place <= self.committed:
                self._reply(message.client, session)
            return  # otherwise it is under way, or long answered
        del source
        self._take(replace(message, kind=MessageKind.FORWARD, place=self.last + 1), now)

    def on_forward(self, message: Message, now: float) -> None:
        """The server before this one passes an operation on."""
        # Applied past a gap, the state would be one that no other copy has.
        if not (self.whole or self.filled) or message.place > self.last + 1:
            return  # what is missing will come again
        if message.place == self.last + 1:
            # Exactly the next place: the log is applied in order, without gaps, on every copy.
            self._take(message, now)
        else:
            self._confirm()

    def on_commit(self, source: int, message: Message, now: float) -> bool:
        """Up to where the next server holds everything, or the one before has answered. True if the coordinator should
        know what has become of it."""
        if source == self.at.before:
            return self._has_answered(message.place)
        if source != self.at.next:
            return False
        before = self.caught_up
        # A confirmation from an earlier view may name a place that this server, restored since, has not reached.
        self.handover.confirm(min(message.place, self.last))
        if message.meta:
            self.answered = None
        self._pass_on(now)
        self._commit(self.last if self.at.is_tail else min(message.place, self.last))
        return self.caught_up and not before

    def on_ask(self, source: int, message: Message) -> None:
        """A client wants to know something."""
        if self.at.is_tail:
            # Parked even if it can be answered at once: a machine may give None (rows of a step that is not applied
            # yet), and then the next commit tries again.
            self.parked[source, message.seq] = message
            self._answer(source, message.seq)

    def is_fed_by(self, source: int, epoch: int) -> bool:
        """Whether a server has been before this one since then, and this one is a newcomer."""
        return not self.at.is_member and source == self.at.before and epoch >= self.fed_since

    def on_snapshot(self, message: Message, now: float) -> bool:
        """Become what the server before this one is; True if this one is whole now and was not.

        Without a tensor it is a request: the next server has no state.
        """
        if message.tensor is None:
            sent = self.handover.snapshot_sent
            if not self.has_newcomer and (sent is None or now >= self.handover.due):
                self.send_snapshot(now)  # a newcomer has to wait for its turn
            return False
        came = not self.whole and self.at.is_member
        # A snapshot that comes twice, or late, must not undo operations that were applied after it.
        if not self.whole and (not self.filled or message.place > self.last):
            value, sessions = message.meta
            self.machine.restore(value, message.tensor)
            self.sessions = {client: Session(*fields) for client, *fields in sessions}
            self.last = message.place
            self.filled = True
        self.whole = self.whole or came  # whoever sends it to a member waits for that one from then on
        if self.at.is_tail:
            self._commit(self.last)
        self._confirm(first=True)
        return came

    def on_time(self, now: float) -> None:
        """Send again what is not confirmed."""
        if not self.whole and not self.filled:
            if (
                self.at.before is not None
                and self.at.is_member
                and now - self.snapshot_requested >= RESEND_SNAPSHOT
            ):
                self._ask_for_snapshot(now)
        elif self.at.next is not None and now >= self.handover.due:
            self.send_again(now)

    # What it does.

    def _take(self, message: Message, now: float) -> None:
        handed = self.handover
        if not self.at.is_tail or handed.open or handed.snapshot_sent is not None:
            # The others work on it while this one does.
            if self.at.is_tail and message.where is not None and message.tensor is not None:
                # Whoever sent it is answered before the newcomer has it, and may then use that memory again.
                kept = replace(message, tensor=message.tensor.clone(), where=None)
            else:
                kept = message
            handed.add(kept)
            self._pass_on(now)
        # A refused operation keeps its place in the log: every copy refuses it alike.
        # Passed on above before it is applied here: a chain of n copies then takes about one apply time, not n.
        status, done = attempt(self.machine.apply, message)
        self.last = message.place
        value = None if done is None else done.value
        self.sessions[message.client] = Session(message.seq, message.place, status, value)
        if self.at.is_tail:
            self._commit(self.last)
        elif not self.at.is_member:
            self._confirm()

    def _commit(self, place: int) -> None:
        # Without a commit clients get no answer: they slow down to what the newcomer takes, and the log is bounded.
        crowded = self.has_newcomer and self.handover.nbytes > self.log_limit
        if place > self.committed and not crowded:
            newly = [
                (client, session)
                for client, session in self.sessions.items()
                if self.committed < session.place <= place
            ]
            self.committed = place
            if self.at.is_head:
                for client, session in newly:
                    self._reply(client, session)
        self._confirm()
        if self.at.is_tail:
            for client, seq in list(self.parked):
                self._answer(client, seq)

    def _answer(self, client: int, seq: int) -> None:
        if not self.whole:
            return
        message = self.parked[client, seq]
        status, found = attempt(self.machine.answer, message)
        if found is not None:
            del self.parked[client, seq]
            meta = [status, found.value]
            where = found.where
            reply = self._message(MessageKind.REPLY, client=client, seq=seq, meta=meta)
            self.send(client, replace(reply, tensor=found.tensor, where=where))

    def _reply(self, client: int, session: Session) -> None:
        meta = [session.status, session.value]
        self.send(client, self._message(MessageKind.REPLY, client=client, seq=session.seq, meta=meta))

    def _confirm(self, first: bool = False) -> None:
        """To the server before this one: what is held here and by all who come after, and whether this one is whole."""
        # COMMIT travels up the chain and is cumulative, so a lost one is made good by the next.
        # A member vouches for all after it; a newcomer is the last of all, and vouches for itself.
        held = self.committed if self.at.is_member else self.last
        if self.at.before is not None and (held or first):
            self.send(self.at.before, self._message(MessageKind.COMMIT, place=held, meta=self.whole))

    def _has_answered(self, place: int) -> bool:
        came = not self.whole and self.filled and self.last >= place
        self.whole = self.whole or came
        if self.whole and self.at.is_tail:
            self._commit(self.last)
        self._confirm(first=self.whole)
        return came

    def send_again(self, now: float) -> None:
        """To the next server: whatever it has not confirmed."""
        if self.handover.snapshot_sent is not None:
            self.send_snapshot(now)
        elif self.handover.log or self.answered is not None:
            self.send_log(now)

    def send_log(self, now: float) -> None:
        """To the next server: what it has not confirmed."""
        self.handover.rewind()
        self._pass_on(now)
        if self.answered is not None and self.at.next is not None:
            self.send(self.at.next, self._message(MessageKind.COMMIT, place=self.answered))
            self.handover.due = max(self.handover.due, now + RESEND)

    def _pass_on(self, now: float) -> None:
        for message in self.handover.outgoing(now):
            assert self.at.next is not None
            self.send(self.at.next, replace(message, epoch=self.epoch))

    def _ask_for_snapshot(self, now: float) -> None:
        assert self.at.before is not None
        self.send(self.at.before, self._message(MessageKind.SNAPSHOT))
        self.snapshot_requested = now

    def send_snapshot(self, now: float) -> None:
        """To the next server: all that is here."""
        if not self.whole or self.at.next is None:
            return
        value, tensor = self.machine.snapshot()
        sessions = [[c, s.seq, s.place, s.status, s.value] for c, s in self.sessions.items()]
        message = self._message(MessageKind.SNAPSHOT, place=self.last, meta=[value, sessions])
        self.send(self.at.next, replace(message, tensor=tensor))
        self.log_limit = tensor.nbytes / _ROOM
        self.handover.sent_snapshot(tensor.nbytes, now)

    def _message(
        self, kind: MessageKind, place: int = 0, client: int = 0, seq: int = 0, meta: object = None
    ) -> Message:
        return Message(kind, self.epoch, self.shard, client, seq, place, meta=meta)
