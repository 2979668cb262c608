"""A network that exists only in this process, with a clock of its own: messages are delayed, lost, doubled and overtake
each other, processes are killed and stopped, all by one seed. The same seed gives the same run.

Handlers are the real ones, `on_message(source, message, now)` and `on_time(now)`; only sockets and time are replaced.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shoal.server.client.conversations import Conversation
from shoal.server.client.requests import Request
from shoal.server.protocol.messages import Message, MessageKind, Send

TICK = 0.05
"""Seconds between two calls of `on_time`."""
LATEST = 1.0
"""Seconds that the latest messages take."""


class Handler(Protocol):
    """What a process does."""

    def on_message(self, source: int, message: Message, now: float) -> None: ...
    def on_time(self, now: float) -> None: ...


H = TypeVar("H", bound=Handler)
T = TypeVar("T")


@dataclass(frozen=True)
class Weather:
    """How bad the network is."""

    lost: float = 0.0
    doubled: float = 0.0
    slowest: float = 0.003
    """Seconds; each message takes a time of its own up to this."""
    late: float = 0.0
    """So many take up to a second: what a process has sent may arrive when its successor is at work."""


class Network:
    """Processes and the messages between them.

    >>> from shoal.server.protocol.messages import Message, MessageKind, Send
    >>> class Echo:
    ...     def __init__(self, send): self.send, self.heard = send, []
    ...     def on_message(self, source, message, now): self.heard.append(source)
    ...     def on_time(self, now): pass
    >>> network = Network(seed=1)
    >>> one = network.start(1, Echo)
    >>> two = network.start(2, Echo)
    >>> one.send(2, Message(MessageKind.BYE))
    >>> network.run(0.1)
    >>> two.heard
    [1]
    """

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.random = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._processes: dict[int, tuple[int, Handler]] = {}
        """Id -> which life of it, and its handler."""
        self._lives = 0
        self._stopped: dict[int, float] = {}
        self._losing: dict[tuple[int, int], float] = {}
        self.messages = 0

    def start(self, who: int, make: Callable[[Send], H]) -> H:
        """Start a process: `make(send)` gives its handler."""
        self._lives += 1
        life = self._lives

        def send(target: int, message: Message) -> None:
            current = self._processes.get(who)
            if current is not None and current[0] == life:
                self._send(who, target, message)

        made = make(send)
        self._processes[who] = (life, made)
        self._tick(who, life)
        return made

    def kill(self, who: int) -> None:
        """End a process at once. What it has sent is under way and may still arrive."""
        self._processes.pop(who, None)
        self._stopped.pop(who, None)

    def stop(self, who: int, seconds: float) -> None:
        """Let a process do nothing for a while, as SIGSTOP would; what is sent to it waits."""
        self._stopped[who] = self.now + seconds

    def lose(self, source: int, target: int, seconds: float) -> None:
        """Lose all that one process sends to another for a while."""
        self._losing[source, target] = self.now + seconds

    def alive(self, who: int) -> bool:
        """Whether a process runs, or is only stopped."""
        return who in self._processes

    def works(self, who: int) -> bool:
        """Whether a process runs."""
        return self.alive(who) and self._stopped.get(who, 0.0) <= self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def work(self, who: int, seconds: float, action: Callable[[], None]) -> None:
        """Have a process do something later: not while it is stopped, and never if it has ended by then."""
        life = self._processes.get(who, (0, None))[0]

        def act() -> None:
            until = self._stopped.get(who, 0.0)
            if self._processes.get(who, (0, None))[0] != life:
                return
            if until > self.now:
                self.after(until - self.now, act)
            else:
                action()

        self.after(seconds, act)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until something holds."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end and not until():
            self.now, _, action = heapq.heappop(self._events)
            action()
        if not until():
            self.now = max(self.now, end)

    def _tick(self, who: int, life: int) -> None:
        def tick() -> None:
            current = self._processes.get(who)
            if current is not None and current[0] == life:
                if self._stopped.get(who, 0.0) <= self.now:
                    current[1].on_time(self.now)
                self.after(TICK, tick)

        self.after(self.random.uniform(0, TICK), tick)

    def _send(self, source: int, target: int, message: Message) -> None:
        draw = self.random
        weather = self.weather
        self.messages += 1
        if message.kind == MessageKind.REPLY and message.tensor is not None:
            message = replace(
                message, tensor=message.tensor.clone()
            )  # values go on changing; ShmTransport does the same
        copies = 1
        if draw.random() < weather.lost or self._losing.get((source, target), 0.0) > self.now:
            copies = 0
        elif draw.random() < weather.doubled:
            copies = 2
        for _ in range(copies):
            slowest = LATEST if weather.late and draw.random() < weather.late else weather.slowest
            self.after(draw.uniform(0.0002, slowest), lambda: self._deliver(source, target, message))

    def _deliver(self, source: int, target: int, message: Message) -> None:
        current = self._processes.get(target)
        if current is None:
            return
        until = self._stopped.get(target, 0.0)
        if until > self.now:
            self.after(until - self.now, lambda: self._deliver(source, target, message))
        else:
            current[1].on_message(source, message, self.now)


def converse(network: Network, conversation: Conversation[T], then: Callable[[T], None]) -> None:
    """Run a conversation of a simulated worker: go on when the requests that it waits for are answered."""
    try:
        waiting = next(conversation)
    except StopIteration as stop:
        result: T = stop.value
        network.after(0.0, lambda: then(result))
        return
    left = [request for request in waiting if not request.done]
    if not left:
        network.after(0.0, lambda: converse(network, conversation, then))
        return
    counter = [len(left)]

    def answered(_: Request) -> None:
        counter[0] -= 1
        if counter[0] == 0:
            converse(network, conversation, then)

    for request in left:
        request.then = answered
