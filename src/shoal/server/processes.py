"""Servers and the coordinator on real sockets: their loops, as threads of a process or as processes of their own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from shoal.server.dense.dense_machine import Dense
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.node import Node
from shoal.server.protocol.messages import BEAT, COORDINATOR, Message, MessageKind, Send
from shoal.server.protocol.session import MALFORMED
from shoal.server.protocol.state_machine import Machine
from shoal.server.replication.coordinator import Coordinator
from shoal.server.rows.row_machine import RowMachine
from shoal.server.transport.auth import LOOPBACK
from shoal.server.transport.frames import BadFrame
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import ShmTransport, new_id
from shoal.server.transport.sockets import Wire

LATE_SECONDS = 10.0
"""How much later than the first, which is done already, another worker may come."""
MACHINES: dict[str, Callable[[], Machine]] = {"ledger": Ledger, "dense": Dense, "rows": RowMachine}


def make_machine(kind: str) -> Machine:
    """The machine of a shard."""
    return MACHINES[kind]()


def sending(post: ShmTransport) -> Send:
    """Send for a server: it outlives what cannot be sent, such as a shard too large for a message, and says so once.

    Whoever waits for it waits on; those who want something else must not lose the server.
    """
    said = set[tuple[int, MessageKind]]()

    def send(peer: int, message: Message) -> None:
        try:
            post.send(peer, message)
        except BadFrame as reason:
            if (peer, message.kind) not in said:
                said.add((peer, message.kind))
                print(f"shoal: a {message.kind.name} cannot be sent: {reason}", file=sys.stderr)

    return send


def serve(
    coordinator: str,
    keys: JobKeys | None,
    listen: str = LOOPBACK,
    slot: int = -1,
    me: int = 0,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Be a server of the job whose coordinator is at an address, until `ended`."""
    with Wire(me or new_id(), keys, listen) as wire:
        post = ShmTransport(wire)
        post.know(COORDINATOR, coordinator)
        node = Node(wire.me, wire.address, make_machine, sending(post), slot)
        # The part of its time that a server works: what waits for one that is always busy waits in a long queue.
        busy = 0.0
        worked = 0.0
        looked = time.monotonic()
        node.load = lambda: {"busy": busy, "refused": float(wire.refused)}
        while not ended():
            arrived = post.receive(BEAT / 2)
            began = time.monotonic()
            for source, message in arrived:
                if message.kind == MessageKind.UNSEEN:
                    node.send_again(message.shard, time.monotonic())
                else:
                    with suppress(
                        *MALFORMED
                    ):  # of a message that its sender should not have sent, nothing is believed
                        node.on_message(source, message, time.monotonic())
                node.on_time(time.monotonic())  # signs of life come between long operations too
            now = time.monotonic()
            worked += now - began
            if now - looked >= 1.0:
                busy = worked / (now - looked)
                worked = 0.0
                looked = now
            node.on_time(now)


def coordinate(
    keys: JobKeys | None,
    listen: str = LOOPBACK,
    generation: int = 1,
    ready: Callable[[str, Coordinator], None] = lambda *_: None,
    ended: Callable[[], bool] = lambda: False,
    gone: Callable[[], list[int]] = list,
) -> None:
    """Be the coordinator of a job. `ready` gets its address and itself; `gone` tells who has ended of late."""
    with Wire(COORDINATOR, keys, listen) as wire:
        post = ShmTransport(wire)
        coordinator = Coordinator(generation, post.send)
        ready(wire.address, coordinator)
        while not ended():
            for source, message in post.receive(BEAT / 5):
                with suppress(*MALFORMED):
                    coordinator.on_message(source, message, time.monotonic())
            now = time.monotonic()
            for who in gone():
                coordinator.gone(who, now)
            coordinator.on_time(now)


class Threads:
    """A coordinator and servers as threads of this process, for so many workers: where no launcher started any."""

    def __init__(self, servers: int, keys: JobKeys | None, listen: str = LOOPBACK, workers: int = 1) -> None:
        self._expected = workers
        self._ended = threading.Event()
        self._keys = keys
        self._threads = list[threading.Thread]()
        self.address = ""
        self._coordinator: Coordinator | None = None
        there = threading.Event()

        def ready(address: str, coordinator: Coordinator) -> None:
            self.address = address
            self._coordinator = coordinator
            there.set()

        self._start(lambda: coordinate(keys, listen, ready=ready, ended=self._ended.is_set))
        if not there.wait(10.0):
            raise RuntimeError("the coordinator did not start")
        self.add(servers, listen)

    def add(self, servers: int, listen: str = LOOPBACK) -> None:
        """Start more servers."""
        for _ in range(servers):
            self._start(lambda: serve(self.address, self._keys, listen, ended=self._ended.is_set))

    def close(self) -> None:
        """End them all, when the workers have said goodbye: they need the servers to their own end."""
        late = time.monotonic() + LATE_SECONDS
        # The servers live in the first worker: ending them at once would fail workers that still write their last step.
        while self._threads[0].is_alive() and self._needed(time.monotonic() < late):
            time.sleep(0.01)
        self._ended.set()
        for thread in self._threads:
            thread.join(5.0)

    def _needed(self, hoping: bool) -> bool:
        """Whether a worker is here, or has not come yet and still may."""
        coordinator = self._coordinator
        return coordinator is not None and (
            bool(coordinator.workers) or (hoping and len(coordinator.met) < self._expected)
        )

    def _start(self, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, name=f"shoal-server-{os.getpid()}", daemon=True)
        thread.start()
        self._threads.append(thread)
