"""A worker's connection to the servers: a thread that talks, and conversations that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shoal.errors import ServersLost
from shoal.server.client import Client, Request
from shoal.server.keys import JobKeys
from shoal.server.message import Kind, Message
from shoal.server.node import BEAT, COORDINATOR
from shoal.server.post import Post, same_host
from shoal.server.wire import Wire
from shoal.server.work import Conversation

T = TypeVar("T")

START_SECONDS = 60.0
"""How long the servers may take to be there."""
STALL_SECONDS = 30.0
"""How long nothing may be heard from any server before a worker gives up."""


class Link:
    """One worker's line to coordinator and servers. `client` is used under `lock` only."""

    def __init__(
        self, me: int, coordinator: str, keys: JobKeys | None, rank: int, terms: Sequence[Any]
    ) -> None:
        self.me = me
        self.rank, self._terms = rank, list(terms)
        self._out: deque[tuple[int, Message]] = deque()
        self.lock = threading.Condition()
        self.client = Client(self.me, self._queue, near=lambda server: same_host(me, server))
        self._post = Post(Wire(self.me, keys, listen=None))
        self._post.know(COORDINATOR, coordinator)
        self._ended, self._problem = False, ""
        self._heard = self._began = time.monotonic()
        self.held_since: float | None = None
        """When the part was claimed that this worker is working on."""
        self.news: dict[str, Any] = {}
        """What the coordinator last said of the servers: whether all copies are whole, and how busy each is."""
        self.waited = 0.0
        """Seconds that conversations have waited, all in all."""
        self._thread = threading.Thread(target=self._talk, name="shoal-link", daemon=True)
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        """On the wire and in memory."""
        return self._post.wire.sent_bytes + self._post.shared_bytes

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
        self._post.wire.wake()
        self._thread.join(5.0)

    def _wait(self, requests: Sequence[Request]) -> None:
        while not all(request.done for request in requests):
            self.lock.wait(1.0)
            if self._problem:
                raise ServersLost(self._problem)
            now = time.monotonic()
            if not self.client.view.chains and now - self._began > START_SECONDS:
                raise ServersLost(
                    f"no servers after {START_SECONDS:.0f} s: {self._terms[2]} are wanted; start more, or use fewer."
                )
            if self.client.view.chains and now - self._heard > STALL_SECONDS:
                raise ServersLost(
                    f"nothing heard from servers or coordinator for {STALL_SECONDS:.0f} s; they have ended or cannot "
                    "be reached. Start again from the last checkpoint."
                )

    def _queue(self, peer: int, message: Message) -> None:
        self._out.append((peer, message))
        self._post.wire.wake()

    def _talk(self) -> None:
        beat = 0.0
        try:
            while not self._ended:
                arrived = self._post.receive(BEAT)
                now = time.monotonic()
                with self.lock:
                    for _, message in arrived:
                        self._take(message, now)
                    if now - beat >= BEAT:
                        beat = now
                        self.client.on_time(now)
                        self._out.append((COORDINATOR, self._sign(now)))
                    if arrived:
                        self._heard = now
                        self.lock.notify_all()
                self._send_all()
            self._out.append((COORDINATOR, Message(Kind.BYE, client=self.me)))
            self._send_all()
            self._post.close(linger=1.0)
        except BaseException as error:
            with self.lock:
                self._problem = f"the connection to the servers broke: {error!r}"
                self.lock.notify_all()
            raise

    def _take(self, message: Message, now: float) -> None:
        if message.kind == Kind.UNSEEN:
            self.client.send_again(message.shard, message.seq)
            return
        if message.kind == Kind.ALIVE:
            self.news = {**message.meta, "epoch": message.epoch}
            return
        self.client.on_message(message, now)
        if self.client.view.failed:
            self._problem = self.client.view.failed

    def _send_all(self) -> None:
        while self._out:
            self._post.send(*self._out.popleft())

    def _sign(self, now: float) -> Message:
        held = 0.0 if self.held_since is None else now - self.held_since
        told = {"role": "worker", "rank": self.rank, "held": held, "terms": self._terms}
        return Message(Kind.ALIVE, self.client.view.epoch, client=self.me, meta=told)
