"""A server: its shards, and what it tells the coordinator. Sans I/O: messages in, messages out, time as a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from shoal.server.protocol.messages import BEAT, COORDINATOR, Message, MessageKind, Send
from shoal.server.protocol.signs_of_life import Confirmation, ServerSign
from shoal.server.protocol.state_machine import Machine
from shoal.server.protocol.view import View
from shoal.server.replication.chain import Chain

_EARLY = 256
"""Messages that wait for a view or for a lease are kept: so many, the newest."""

LEASE = 5.0
"""Seconds for which a server answers questions after the coordinator has confirmed a sign of life that is no older than
that. A coordinator that hears nothing of it goes on without it, but not before twice that time: so nobody reads what
the others have left behind."""

MakeMachine = Callable[[str], Machine]


class Node:
    """One server of a job.

    `slot` is the place among the servers that it was started for, -1 if it takes whichever is free.
    """

    def __init__(
        self,
        me: int,
        address: str,
        make_machine: MakeMachine,
        send: Send,
        slot: int = -1,
        lease: float = LEASE,
    ) -> None:
        self.me = me
        self.address = address
        self.slot = slot
        self._lease = lease
        self._heard = -1e9
        self._promised = 0
        """Below the epochs of the newest coordinator that this server has reported to: no earlier one's views count."""
        self._make = make_machine
        self._send = send
        self.view = View()
        self.chains: dict[int, Chain] = {}
        self._early: deque[tuple[int, Message]] = deque(maxlen=_EARLY)
        self._beat = -1e9
        self.load: Callable[[], dict[str, float]] = dict
        """What else to tell with each sign of life."""

    def on_message(self, source: int, message: Message, now: float) -> None:
        """Whatever comes in, from whomever."""
        if source == COORDINATOR and message.kind == MessageKind.ALIVE:
            self._hear_coordinator(message.meta, now)
            return
        # A read needs a lease: a tail that was replaced without knowing it would answer with an old state. Updates need
        # none, since they are acknowledged by all of the chain.
        if message.kind == MessageKind.ASK and now - self._heard > self._lease:
            # The coordinator's word is on the way here, if this server counts.
            self._early.append((source, message))
            return
        if message.kind == MessageKind.VIEW:
            self._take_view(View.from_meta(message.meta), now)
            return
        chain = self.chains.get(message.shard)
        if message.epoch > self.view.epoch:
            self._early.append((source, message))  # its view is on the way here
            return
        if (
            chain is not None
            and message.kind == MessageKind.SNAPSHOT
            and chain.is_fed_by(source, message.epoch)
        ):
            # As good as on the day when it was sent: the sender keeps all that has been done since.
            message = replace(message, epoch=self.view.epoch)
        if message.epoch != self.view.epoch or chain is None:
            # The client is behind, or ahead by a view that is on its way: tell it what is known here.
            if message.kind in (MessageKind.CALL, MessageKind.ASK) and self.view.epoch:
                self._send(source, Message(MessageKind.VIEW, self.view.epoch, meta=self.view.to_meta()))
            return
        if message.kind == MessageKind.CALL:
            chain.on_call(source, message, now)
        elif message.kind == MessageKind.ASK:
            chain.on_ask(source, message)
        elif message.kind == MessageKind.FORWARD:
            chain.on_forward(message, now)
        elif message.kind == MessageKind.COMMIT:
            if chain.on_commit(source, message, now):
                self._say(MessageKind.READY, now)
            self._fill_newcomers(now)
        elif message.kind == MessageKind.SNAPSHOT and chain.on_snapshot(message, now):
            self._say(MessageKind.READY, now)

    def on_time(self, now: float) -> None:
        """Called often: send again what got lost, and a sign of life."""
        for chain in self.chains.values():
            chain.on_time(now)
        self._fill_newcomers(now)
        if now - self._beat >= BEAT:
            self._say(MessageKind.ALIVE, now)

    def send_again(self, shard: int, now: float) -> None:
        """The next server has not seen memory that a message pointed to, and gets bytes from now on."""
        if shard in self.chains:
            self.chains[shard].send_again(now)

    def whole(self) -> list[int]:
        """The shards whose state is here."""
        return [shard for shard, chain in self.chains.items() if chain.whole]

    def _hear_coordinator(self, confirmation: Confirmation, now: float) -> None:
        at = confirmation["at"]
        if at is not None and now - at <= self._lease:  # else it has waited here, or on the way
            self._heard = now
            self._take_early(now)
        if confirmation["base"] > self._promised:
            self._promised = confirmation["base"]
            self._say(MessageKind.ALIVE, now)

    def _say(self, kind: MessageKind, now: float) -> None:
        """All that a new coordinator would have to know, every time: it may be another than the last one."""
        self._beat = now
        sign: ServerSign = {
            "role": "server",
            "slot": self.slot,
            "address": self.address,
            "whole": self.whole(),
            "caught_up": [shard for shard, chain in self.chains.items() if chain.caught_up],
            "view": self.view.to_meta(),
            "promised": self._promised,
            "at": now,
            "load": self.load(),
        }
        # Sent every beat: the next one makes a lost one good.
        self._send(COORDINATOR, Message(kind, self.view.epoch, client=self.me, meta=sign))

    def _take_view(self, view: View, now: float) -> None:
        before = self.view.epoch
        # Views of a coordinator that has been superseded are refused even if this server has not seen a later one.
        if view.epoch <= max(before, self._promised):
            return
        since = view.since.get(self.me)
        if since is None or since > before > 0:
            self.chains.clear()  # left out, now or in a view that did not get here: what is held counts no more
        self.view = view
        mine = {s for s, chain in enumerate(view.chains) if self.me in (*chain, view.newcomer(s))}
        for shard in [shard for shard in self.chains if shard not in mine]:
            del self.chains[shard]
        self.slot = view.slots.get(self.me, self.slot)
        for shard in sorted(mine):
            counts = self.me in view.chains[shard]
            if shard in self.chains and self.chains[shard].at.is_member and not counts:
                del self.chains[shard]  # it was left out of this chain in a view that did not get here
            if shard not in self.chains:
                made = Chain(self.me, shard, self._make(view.kinds[shard]), self._send)
                # Nobody has committed anything without one who is there since the beginning.
                made.whole = counts and since == view.born and before == 0
                self.chains[shard] = made
            self.chains[shard].change_view(view, now)
        self._fill_newcomers(now)
        self._say(MessageKind.READY, now)
        self._take_early(now)

    def _fill_newcomers(self, now: float) -> None:
        """One snapshot after the other: so each shard is held up by its own bytes only."""
        waiting = [c for c in self.chains.values() if c.whole and c.has_newcomer and not c.handover.open]
        if waiting and all(chain.handover.snapshot_sent is None for chain in waiting):
            waiting[0].send_snapshot(now)

    def _take_early(self, now: float) -> None:
        early = self._early
        self._early = deque(maxlen=_EARLY)
        # Through the front door again: what still does not fit is kept once more.
        for source, message in early:
            self.on_message(source, message, now)
