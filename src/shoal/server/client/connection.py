"""A worker's connection to the servers: a thread that talks, and conversations that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from shoal.errors import ServersLost
from shoal.server.client.conversations import Conversation
from shoal.server.client.requests import SLOWEST, Client, Request
from shoal.server.client.weight_broadcast import Lent, own_address
from shoal.server.protocol.messages import BEAT, COORDINATOR, Message, MessageKind
from shoal.server.protocol.session import MALFORMED
from shoal.server.protocol.signs_of_life import ServersNews, ServiceMessage, WorkerSign
from shoal.server.protocol.state_machine import Answer
from shoal.server.protocol.view import LEDGER, View
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.probe import probe
from shoal.server.transport.shm_transport import ShmTransport, same_host
from shoal.server.transport.sockets import Wire

T = TypeVar("T")

START_SECONDS = 60.0
"""How long the servers of a launcher or of the first worker may take to be there: a busy host starts them slowly."""
STAND_SECONDS = 4.0
"""The same for servers that stand alone, which should be there already."""
PROBE_SECONDS = 2.0
STALL_SECONDS = 30.0
"""How long nothing may be heard from any server before a worker gives up."""
UNANSWERED_SECONDS = 120.0
"""How long a server may take to do something while the coordinator speaks, and all copies are whole."""
LENDER_SECONDS = 5.0
"""How long a worker that lends its values may take to answer, beside the time on a slow wire, or to begin itself."""
BORROW_SECONDS = 20.0
"""How long it may say that nothing more has come to it."""
_AT_ONCE = 4
"""Shards that are asked of it at a time."""


class Link:
    """One worker's line to coordinator and servers. `client` is used under `lock` only."""

    def __init__(
        self,
        me: int,
        coordinator: str,
        keys: JobKeys | None,
        rank: int,
        terms: ServiceMessage,
        standing: bool = False,
    ) -> None:
        """`standing`: the servers should be there already."""
        self.me = me
        self._coordinator = coordinator
        self._keys = keys
        self._standing = standing
        self.rank = rank
        self._terms = terms
        self._out: deque[tuple[int, Message]] = deque()
        self.lock = threading.Condition()
        self.client = Client(self.me, self._queue, near=lambda server: same_host(me, server))
        self._peers = Client(self.me, self._queue, near=lambda worker: same_host(me, worker))
        """Asks the coordinator in the place of a ledger, and one worker in that of all servers."""
        self._peers.change_view(View(1, ((COORDINATOR,),)), time.monotonic())
        self._lender = COORDINATOR
        self.lent = Lent(me)
        # zmq sockets belong to one thread; other threads leave their wish here and wake it.
        self._errands: deque[Callable[[], None]] = deque()
        """For the thread that talks: it alone uses the wire."""
        # Where servers are on other hosts, workers may be too, and come here for first values.
        self._transport = ShmTransport(Wire(self.me, keys, own_address(coordinator)))
        self._address = self._transport.wire.address
        self._transport.know(COORDINATOR, coordinator)
        self._ended = False
        self._problem = ""
        self._heard = self._began = time.monotonic()
        self.met = False
        """Whether anything has been heard at all."""
        self.held_since: float | None = None
        """When the part was claimed that this worker is working on."""
        self.news: ServersNews = {}
        """What the coordinator last said of the servers: whether all copies are whole, and how busy each is."""
        self.waited = 0.0
        """Seconds that conversations have waited, all in all."""
        self._thread = threading.Thread(target=self._talk, name="shoal-link", daemon=True)
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        """On the wire and in memory."""
        return self._transport.wire.sent_bytes + self._transport.shared_bytes

    def run(self, conversation: Conversation[T]) -> T:
        """Lead a conversation to its end; returns what it gives."""
        with self.lock:
            try:
                while True:
                    waiting = next(conversation)
                    began = time.monotonic()
                    self._wait(waiting)
                    self.waited += time.monotonic() - began
            except StopIteration as stop:
                result: T = stop.value
                return result

    def request(self, make: Callable[[Client], Request]) -> Request:
        """Send something off without waiting for it."""
        with self.lock:
            return make(self.client)

    def borrow(self, shards: Mapping[int, int], take: Callable[[int, Answer], bool]) -> int:
        """First values from another worker, by the tree of weight_broadcast.py. Returns their step; -1: there are none.

        `shards`: the bytes of each. `take` gets the answer for each, and says whether it can be used.
        """
        found = None
        if self._address:
            request = self.request(lambda _: self._peers.ask(LEDGER, "source"))
            found = request.answer.value if self._answered([request], 0) and request.answer else None
        with self.lock:
            self.lent.begun = True
            if found is None or not found[2]:
                self.lent.end()  # nobody will ask for them here
        step = -1
        if found is not None:
            lender = int(found[0])
            address = str(found[1])
            self._connect(lender, address, max(shards))
            # A tree of hosts instead of all from the servers, whose line would else carry the model once for every
            # worker (decision 0025).
            step = self._borrow_from(lender, shards, take)
            self._errands.append(lambda: self._transport.wire.disconnect(lender))
            self._errands.append(self._transport.opened.close)  # what it lends must not stay for our sake
        if step < 0:
            with self.lock:
                self.lent.end()
        return step

    def lend(self, step: int, shard: int, values: torch.Tensor) -> None:
        """Let other workers have the values of a shard, if any may come for them."""
        with self.lock:
            if self._address and not self.lent.over:
                self.lent.add(step, shard, values, self.now())

    def _connect(self, lender: int, address: str, shards: int) -> None:
        with self.lock:
            self._lender = lender
            far = not same_host(self.me, lender)
            self._errands.append(lambda: self._transport.wire.connect(lender, address, ahead=far))
            # To the client one worker looks like servers with chains of one: requests, resends and patience are the
            # same.
            chains = ((COORDINATOR,), *[(lender,)] * shards)
            self._peers.change_view(View(2, chains), self.now())

    def _borrow_from(
        self, lender: int, shards: Mapping[int, int], take: Callable[[int, Answer], bool]
    ) -> int:
        left = list(shards)
        steps = set[int]()
        moved = self.now()
        patience = LENDER_SECONDS
        while left:
            # What it has, it says at once; only then can bytes be on their way.
            batch = left[: _AT_ONCE if steps else 1]
            name = "values" if steps else "lends"
            with self.lock:
                requests = [self._peers.ask(n, name, {"of": lender}, expects=shards[n]) for n in batch]
            if not self._answered(requests, sum(shards[n] for n in batch) if steps else 0):
                return -1
            for n, answer in [(n, r.answer) for n, r in zip(batch, requests, strict=True) if r.answer]:
                value = answer.value if isinstance(answer.value, dict) else {}
                if value.get("wait"):
                    patience = BORROW_SECONDS if value.get("begun") else LENDER_SECONDS
                    continue
                steps.add(int(value.get("step", -1)))
                # Shards of two different steps are no model; the servers are asked instead.
                if steps == {-1} or len(steps) > 1 or (name == "values" and not take(n, answer)):
                    return -1
                left = [m for m in left if m != n or name == "lends"]
                moved = self.now()
            if self.now() - moved > patience:
                return -1
            if left[:1] == batch[:1] and not steps:
                time.sleep(0.02)  # it has none yet itself
        return steps.pop() if len(steps) == 1 else -1

    def _answered(self, requests: Sequence[Request], nbytes: int) -> bool:
        """Whether all of these are answered in time; `nbytes` are on their way then."""
        end = time.monotonic() + LENDER_SECONDS + nbytes / SLOWEST
        with self.lock:
            while not all(request.done for request in requests):
                left = end - time.monotonic()
                if left <= 0 or self._problem:
                    return False
                self.lock.wait(left)
        return True

    def wait(self, requests: Sequence[Request]) -> None:
        """Until all of these are answered."""
        with self.lock:
            self._wait(requests)

    @staticmethod
    def now() -> float:
        """The clock of `held_since`."""
        return time.monotonic()

    def close(self) -> None:
        """Say goodbye and end."""
        if self._ended:
            return
        self._ended = True
        self._transport.wire.wake()
        self._thread.join(5.0)

    def _wait(self, requests: Sequence[Request]) -> None:
        began = time.monotonic()
        while not all(request.done for request in requests):
            self.lock.wait(1.0)
            if self._problem:
                raise ServersLost(self._problem)
            now = time.monotonic()
            if not self.client.view.chains:
                self._check_start(now - self._began)
            # While a copy is being repaired a head may rightly answer nobody; the clock counts against it only when all
            # are whole.
            if now - began > UNANSWERED_SECONDS and self.news.get("whole"):
                self._check_answers(requests, now - began)
            if self.client.view.chains and now - self._heard > STALL_SECONDS:
                raise ServersLost(
                    f"nothing heard from servers or coordinator for {STALL_SECONDS:.0f} s; they have ended or cannot "
                    "be reached. Start again from the last checkpoint."
                )

    def _check_start(self, seconds: float) -> None:
        """The servers are not there yet: raise why, as soon as that is clear."""
        where = self._coordinator.removeprefix("tcp://")
        late = seconds > START_SECONDS
        if self.met:
            if late or (self._standing and seconds > STAND_SECONDS):
                raise ServersLost(
                    f"too few servers after {seconds:.0f} s: the coordinator at {where} has "
                    f"{self.news.get('servers', 0)}, and servers={self._terms[2]} are wanted; start more with "
                    "`shoal server --join`, or say servers=N with a smaller N."
                )
            return
        if not late and not (self._standing and seconds > STAND_SECONDS):
            return
        found = probe(self._coordinator, self._keys, PROBE_SECONDS) if self._keys is not None else "nobody"
        if found == "wrong keys":
            raise ServersLost(
                f"the coordinator at {where} does not take these keys: they are of another job; give keys= the file "
                "that its own `shoal server --keys` has written."
            )
        if found == "nobody":
            raise ServersLost(
                f"nobody listens at {where} after {seconds:.0f} s; start `shoal server --listen {where}` first, and "
                "look whether the address and a firewall let workers reach it."
            )
        if late:
            raise ServersLost(
                f"the coordinator at {where} takes the keys and has said nothing for {seconds:.0f} s; look at its "
                "host, which may be overloaded, or stopped."
            )

    def _check_answers(self, requests: Sequence[Request], seconds: float) -> None:
        """Raise if a call is unanswered for too long. Servers carry calls out at once; only questions may wait."""
        for request in requests:
            if (
                not request.done
                and request.kind == MessageKind.CALL
                and seconds > 2 * request.weight / SLOWEST
            ):
                where = self.client.view.addresses.get(self.client.view.head(request.shard), "nowhere")
                raise ServersLost(
                    f"the server at {where} has not answered '{request.name}' for {seconds:.0f} s, though the "
                    "coordinator speaks; a firewall may be between, for servers listen at ports of their own."
                )

    def _queue(self, peer: int, message: Message) -> None:
        self._out.append((peer, message))
        self._transport.wire.wake()

    def _talk(self) -> None:
        beat = 0.0
        try:
            while not self._ended:
                arrived = self._transport.receive(BEAT)
                now = time.monotonic()
                with self.lock:
                    for source, message in arrived:
                        self._take(source, message, now)
                    if now - beat >= BEAT:
                        beat = now
                        self.client.on_time(now)
                        self._peers.on_time(now)
                        self.lent.on_time(now)
                        # Sent even when nothing else is: silence is how the coordinator notices that a worker is gone.
                        self._out.append((COORDINATOR, self._sign(now)))
                    if arrived:
                        self.met = True
                        self._heard = now
                        self.lock.notify_all()
                self._send_all()
            self._out.append((COORDINATOR, Message(MessageKind.BYE, client=self.me)))
            self._send_all()
            self._transport.close(linger=1.0)
        # This thread is the only one that receives: if it ended in silence, every conversation would wait for ever.
        except BaseException as error:
            with self.lock:
                self._problem = f"the connection to the servers broke: {error!r}"
                self.lock.notify_all()
            raise

    def _take(self, source: int, message: Message, now: float) -> None:
        # Two clients share one wire, and number their calls alike: the sender tells whose answer it is.
        of_peer = source in (COORDINATOR, self._lender)
        if message.kind == MessageKind.ASK:
            with suppress(*MALFORMED):  # of a question that nobody should ask, nothing is believed
                self._out.append((source, self.lent.answer(message, now)))
            return
        if message.kind == MessageKind.UNSEEN:
            (self._peers if of_peer else self.client).send_again(message.shard, message.seq)
            return
        if message.kind == MessageKind.REPLY and of_peer:
            self._peers.on_message(message, now)
            return
        if message.kind == MessageKind.ALIVE:
            if isinstance(message.meta, dict):
                self.news = {
                    "whole": message.meta.get("whole", False),
                    "busy": message.meta.get("busy", []),
                    "servers": message.meta.get("servers", 0),
                    "epoch": message.epoch,
                }
            return
        self.client.on_message(message, now)
        if self.client.view.failed:
            self._problem = self.client.view.failed

    def _send_all(self) -> None:
        # Before messages: one may be for a peer that an errand connects to.
        while self._errands:
            self._errands.popleft()()
        while self._out:
            self._transport.send(*self._out.popleft())

    def _sign(self, now: float) -> Message:
        held = 0.0 if self.held_since is None else now - self.held_since
        sign: WorkerSign = {
            "role": "worker",
            "rank": self.rank,
            "held": held,
            "terms": self._terms,
            "address": self._address,
        }
        return Message(MessageKind.ALIVE, self.client.view.epoch, client=self.me, meta=sign)
