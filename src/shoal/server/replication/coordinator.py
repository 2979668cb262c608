"""The coordinator: who is alive, and which server holds which shard. Sans I/O.

It decides and remembers nothing that would be lost with it: servers tell it the view they act in and the shards they
hold with every sign of life, so a new coordinator learns all from them. Each coordinator of a job has a generation,
larger than the one before; its epochs begin where no earlier one's can reach, so what an earlier one still says is
ignored everywhere.

An earlier one may have ended when only some had its last view, and those may have acted in it. So what a server says
counts only once it has promised to take no view of an earlier coordinator any more. When all members of the newest
view that is known have said what they have, nobody acts in a later one. If one is missing, it may have gone on alone;
but whoever has an answer of it has its view too, and workers tell of views that this coordinator does not know.

No decision rests on clocks being equal: only the time between two messages, by this process's own clock, makes it
suspect somebody. A suspicion that was wrong costs a server its part in the job, never an update.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.server.client.requests import Client, Request
from shoal.server.protocol.messages import BEAT, COORDINATOR, Message, MessageKind, Send
from shoal.server.protocol.session import OK
from shoal.server.protocol.signs_of_life import Confirmation, ServerSign, ServersNews, WorkerSign
from shoal.server.protocol.view import LEDGER, View
from shoal.server.replication.membership import (
    ENDED,
    Server,
    ServiceTerms,
    Worker,
    all_whole,
    first_view,
    grown,
    heads_without_state,
    is_given_up,
    lighter,
    missing_copies,
    repaired,
    seemingly_lost,
    source_of,
    would_hold,
)

SILENCE = 10.0
"""Seconds without a sign of life after which a process counts as gone. A server gives none while it computes; the end
of a process that a launcher has started is seen at once."""
BALANCE = 5.0
"""Seconds between two looks at how busy servers are."""
_UNEVEN = 0.3
"""Servers may differ by so much of their time before a shard moves from the busiest."""
_LOOK_AROUND = 2.0
"""Seconds in which a new coordinator hears of servers that have worked for another before, if there are any."""
_GROW = 0.25
"""Seconds between two views that let newcomers in: every view has everybody send again what is not answered."""
GENERATION_BITS = 32


class Coordinator:
    """Membership of one job."""

    def __init__(
        self, generation: int, send: Send, silence: float = SILENCE, balance: float = BALANCE
    ) -> None:
        self._send = send
        self._silence = silence
        self._balance_every = balance
        self._base = generation << GENERATION_BITS
        self.servers: dict[int, Server] = {}
        self.workers: dict[int, Worker] = {}
        self.met: set[int] = set()  # every worker that has ever spoken
        self._ended: set[int] = set()  # everybody that somebody has seen end
        self._waits = False  # for servers that a worker knows of
        self.view = View()
        self.terms: ServiceTerms | None = None
        # Whoever takes over waits for those who know more; the first of all has nothing to learn.
        self._learning_until: float | None = None if generation == 1 else math.inf
        self._client = Client(COORDINATOR, send, first=self._base)
        self._dirty = False
        self._announced = -1e9
        self._balanced = self._grew = -1e9
        self._took_over = False
        self._doubt: float | None = None
        """Since when a shard seems to be lost."""

    # What comes in.

    def on_message(self, source: int, message: Message, now: float) -> None:
        """A sign of life, an answer of the ledger, or a worker that looks for first values."""
        if message.kind == MessageKind.REPLY:
            self._client.on_message(message, now)
        elif message.kind == MessageKind.ASK and source in self.workers and message.meta[0] == "source":
            self._send(
                source, replace(message, kind=MessageKind.REPLY, meta=[OK, source_of(source, self.workers)])
            )
        elif message.kind in (MessageKind.ALIVE, MessageKind.READY):
            sign = message.meta
            if sign["role"] == "server":
                self._hear_server(source, sign, now)
            elif sign["role"] == "witness":
                view = View.from_meta(sign["view"])
                if self.view.chains or not self.servers.keys().isdisjoint(view.addresses):
                    self._learn(view, now)  # else it is of a job whose servers have all ended
            else:
                self._hear_worker(source, message, sign, now)
        elif message.kind == MessageKind.BYE:
            self.workers.pop(source, None)
            self._release(source)

    def gone(self, who: int, now: float) -> None:
        """A process has ended, as its launcher or its host saw: now, or before this coordinator was there."""
        self._ended.add(who)
        if who in self.servers:
            self.servers[who].gone = True
        else:
            self.workers.pop(who, None)
            self._release(who)
        self.on_time(now)

    def on_time(self, now: float) -> None:
        """Called often: notice who is silent, and change the view if it must change."""
        if self._learning_until == math.inf:
            # Time starts with the first call: the process may have been made long before its loop runs.
            self._learning_until = now + min(self._silence, _LOOK_AROUND)
        if self._learning_until is not None and now >= self._learning_until:
            self._learning_until = None
            self._dirty = True
        for who, server in list(self.servers.items()):
            if server.gone or is_given_up(who, self.view, self.servers, now, self._silence):
                del self.servers[who]
                self._dirty = True
        for who, worker in list(self.workers.items()):
            hung = self.terms is not None and worker.held > self.terms.patience
            silent = now - worker.heard > self._silence
            # `lost` stays set until the worker holds no part: one release per claim.
            if (silent or hung) and not worker.lost:
                worker.lost = True
                self._release(who)
            if silent:
                del self.workers[who]
        if not self.view.chains and not self.workers:
            self.terms = None  # of workers that have given up; the next may want fewer servers
        if self._learning_until is None and (self._dirty or not self.view.chains):
            self._dirty = False
            self._decide(now)
        if now - self._balanced >= self._balance_every and self._learning_until is None:
            self._balanced = now
            self._balance(now)
        if now - self._announced >= 5 * BEAT:  # for those who have missed it
            self._announced = now
            self._tell(everybody=False)
        self._client.on_time(now)

    # What it does.

    def _release(self, worker: int) -> None:  # what it was working on goes to others
        if self.view.chains:
            self._client.call(LEDGER, "lost", {"worker": worker})

    def _meet_workers(self, found: Request) -> None:
        """Those of whom the ledger knows may have ended while nobody looked: they are expected to speak."""
        if found.answer is not None and not found.refusal:
            for worker, rank in found.answer.value["ids"]:
                heard = -math.inf if worker in self._ended else self._client.now
                self.workers.setdefault(worker, Worker(heard, rank))

    def _hear_server(self, source: int, sign: ServerSign, now: float) -> None:
        known = View.from_meta(sign["view"])
        if max(known.epoch, sign["promised"]) >> GENERATION_BITS > self._base >> GENERATION_BITS:
            return  # a later coordinator is at work: this one decides nothing any more
        # A server that has promised this generation takes no view of an earlier one. Only such answers count, as in
        # Paxos: otherwise two coordinators could each change the chains.
        if sign["promised"] < self._base:
            self._send(source, self._confirmation(None))
            return  # it may have said this long ago, or still take an earlier coordinator's view
        self._learn(known, now)
        if source not in self.servers:
            self.servers[source] = Server(str(sign["address"]), now, int(sign["slot"]))
            self._dirty = True
        if known.epoch == self.view.epoch and self._learning_until is None:
            self._send(source, self._confirmation(sign["at"]))
        server = self.servers[source]
        server.load = dict(sign["load"])
        server.heard = now
        server.epoch = known.epoch
        server.met = True
        if known.epoch == self.view.epoch or self.view.epoch < self._base:
            server.whole = would_hold(self.view, source, known.epoch, {int(n) for n in sign["whole"]})
            heads = {shard for shard, chain in enumerate(self.view.chains) if chain[0] == source}
            server.caught_up = {int(n) for n in sign["caught_up"]}
            self._dirty = self._dirty or bool(heads - server.whole) or bool(server.caught_up)
        met = self._ended | {s for s, server in self.servers.items() if server.met}
        # Waiting out the silence is for servers that may still speak; when each is heard or known to have ended, nobody
        # is left to wait for.
        if self._learning_until is not None and self.view.chains and met >= set(self.view.addresses):
            self._learning_until = now  # all have reported

    def _learn(self, known: View, now: float) -> None:
        """Go on from the newest view of an earlier coordinator, once all its members had the time to report."""
        if not known.chains or not self.view.epoch < known.epoch < self._base:
            return
        self.view = known
        self._learning_until = now + self._silence
        for server in self.servers.values():
            server.met = False  # that was for another view, and so was what it held
            server.whole = set()
        for who, address in known.addresses.items():
            made = Server(address, now, known.slots.get(who, -1), gone=who in self._ended)
            self.servers.setdefault(who, made)

    def _confirmation(self, at: float | None) -> Message:
        """To a server: who the coordinator is, and when it said what has been heard of it."""
        answer: Confirmation = {"base": self._base, "at": at}
        return Message(MessageKind.ALIVE, self.view.epoch, meta=answer)

    def _hear_worker(self, source: int, message: Message, sign: WorkerSign, now: float) -> None:
        self.met.add(source)
        if source not in self.workers:
            for who, other in self.workers.items():
                if other.rank == sign["rank"] and not other.lost:  # this one is in its place
                    other.address = ""
                    other.lost = True
                    self._release(who)
        worker = self.workers.setdefault(source, Worker(now, int(sign["rank"])))
        worker.held = float(sign["held"])
        worker.heard = now
        worker.address = str(sign.get("address", ""))
        if worker.held == 0.0:
            worker.lost = False
        if message.epoch and not self.view.chains and not self._waits:
            self._waits = True  # servers may be on their way here
            self._learning_until = now + self._silence
        if message.epoch and message.epoch < (self.view.born or math.inf) and self._learning_until is None:
            self._send(
                source, Message(MessageKind.VIEW, self._base, meta=View(self._base, failed=ENDED).to_meta())
            )
            return
        if self.terms is None and sign.get("terms") is not None and (self.view.chains or not message.epoch):
            self.terms = ServiceTerms.of(sign["terms"])
            self._dirty = True
        stale = message.epoch != self.view.epoch  # who knows of a later view answers with that
        self._send(source, self._as_message() if stale else self._news())

    def _decide(self, now: float) -> None:
        """The view that fits who is alive; nothing changes if the present one does."""
        if self.view.failed:
            return
        if not self.view.chains:
            self._begin(now)
            return
        alive = self.servers
        gone = [server for server in self.view.addresses if server not in alive]
        spare = [server for server in alive if server not in self.view.addresses]
        # Repair comes before growth: a view that adds a copy must not hide that a head is gone.
        torn = gone or heads_without_state(self.view, alive) or (spare and missing_copies(self.view))
        if not torn and self.view.epoch > self._base:
            view = grown(self.view, alive)
            if view is not None and now - self._grew >= _GROW:
                self._grew = now
                self._publish(view, now)
            self._dirty = view is not None
            return
        # Repaired too early, the view would call a shard lost that a server has whole and has not reported yet.
        if not self._in_doubt(now):
            self._publish(repaired(self.view, alive, spare), now)

    def _balance(self, now: float) -> None:
        """Let a shard of the busiest server be the idlest's, in two views: first one copy more, then one less."""
        if len(self.view.addresses) <= self.view.replicas or not all_whole(self.view, self.servers):
            return
        busy = {server: self.servers[server].load.get("busy", 0.0) for server in self.view.addresses}
        view = lighter(self.view, busy, _UNEVEN)
        if view is not None:
            self._publish(view, now)

    def _news(self) -> Message:
        """For workers: how the servers are."""
        known = [self.servers[s].load for s in self.view.addresses if s in self.servers]
        busy = [round(load.get("busy", 0.0), 3) for load in known]
        whole = all_whole(self.view, self.servers)
        answer: ServersNews = {"whole": whole, "busy": busy, "servers": len(self.servers)}
        return Message(MessageKind.ALIVE, self.view.epoch, meta=answer)

    def _in_doubt(self, now: float) -> bool:
        """Whether a shard that seems lost may be whole on a server that has had no time to say so."""
        seems = seemingly_lost(self.view, self.servers)
        if not seems or not all(seems):
            self._doubt = None
            return False
        self._doubt = now if self._doubt is None else self._doubt
        expected = any(not server.met for some in seems for server in some)  # until it is given up
        self._dirty = expected or now - self._doubt < 10 * BEAT
        return self._dirty

    def _begin(self, now: float) -> None:
        terms = self.terms
        if terms is None or len(self.servers) < terms.servers:
            return
        self._publish(first_view(terms, self.servers), now)
        for who in self.view.addresses:
            # A new job begins empty, so every member of a chain holds all there is.
            self.servers[who].whole = {s for s, chain in enumerate(self.view.chains) if who in chain}

    def _publish(self, view: View, now: float) -> None:
        # Above every epoch of earlier coordinators, below every epoch of later ones.
        epoch = max(self.view.epoch, self._base) + 1
        since = {server: view.since.get(server, epoch) for server in view.addresses}
        self.view = replace(view, epoch=epoch, born=view.born or epoch, since=since)
        self._announced = now
        self._tell(everybody=True)
        self._client.change_view(self.view, now)
        # A coordinator that has taken over does not know which workers there were; the ledger does.
        if self._base >> GENERATION_BITS > 1 and not self._took_over:
            self._took_over = True
            self._client.ask(LEDGER, "status", then=self._meet_workers)

    def _tell(self, everybody: bool) -> None:
        if not self.view.epoch:
            return
        for server, known in self.servers.items():
            if everybody or known.epoch != self.view.epoch:
                self._send(server, self._as_message())
        for worker in self.workers if everybody else ():
            self._send(worker, self._as_message())

    def _as_message(self) -> Message:
        return Message(MessageKind.VIEW, self.view.epoch, meta=self.view.to_meta())
