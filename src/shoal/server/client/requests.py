"""The client's side: what is sent, sent again, and sent elsewhere after a new view, until it is answered. Sans I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind, Send, Where
from shoal.server.protocol.session import REFUSED
from shoal.server.protocol.state_machine import Answer
from shoal.server.protocol.view import View

RETRY = 0.5
"""Seconds after which an unanswered call is sent again; a question may have to wait, and is repeated more seldom."""
RETRY_ASK = 2.0
SLOWEST = 5e6
"""Bytes a second that a wire carries at least: what is on its way is not sent again before it can be there."""


@dataclass
class Request:
    """A call or a question under way. `answer` comes with time; `refusal` instead, if it can never be done."""

    kind: MessageKind
    shard: int
    seq: int
    name: str
    args: object
    clock: int
    tensor: torch.Tensor | None
    where: Where | None
    then: Callable[[Request], None] | None = None
    answer: Answer | None = None
    refusal: str = ""
    codec: int = 0
    weight: int = 0
    """Bytes that go over a wire for it, there or back."""
    due: float = -1e9
    """When it goes out again."""
    done: bool = field(default=False)


class Client:
    """One client of a job's shards. Calls to a shard go out one after the other; questions go at once."""

    def __init__(
        self, me: int, send: Send, first: int = 0, near: Callable[[int], bool] = lambda _: True
    ) -> None:
        """`first`: above every number that an earlier client of this name has used. `near`: who shares memory."""
        self.me = me
        self._send = send
        self._near = near
        self.view = View()
        self._seq = first
        self._calls: dict[int, deque[Request]] = {}
        self._asks: dict[tuple[int, int], Request] = {}
        self.now = 0.0

    @property
    def waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._asks) + sum(len(queue) for queue in self._calls.values())

    def call(
        self,
        shard: int,
        name: str,
        args: object = None,
        clock: int = 0,
        tensor: torch.Tensor | None = None,
        where: Where | None = None,
        then: Callable[[Request], None] | None = None,
        codec: int = 0,
    ) -> Request:
        """Have something done to a shard. The tensor must stay as it is until the answer is there."""
        request = self._make(MessageKind.CALL, shard, name, args, clock, tensor, where, then)
        request.codec = codec
        queue = self._calls.setdefault(shard, deque())
        queue.append(request)
        # One call at a time for each shard: the server keeps the outcome of the last one only (Session).
        if len(queue) == 1:
            self._put(request)
        return request

    def ask(
        self,
        shard: int,
        name: str,
        args: object = None,
        clock: int = 0,
        tensor: torch.Tensor | None = None,
        then: Callable[[Request], None] | None = None,
        expects: int = 0,
    ) -> Request:
        """Find something out about a shard. `expects`: about so many bytes of numbers."""
        request = self._make(MessageKind.ASK, shard, name, args, clock, tensor, None, then)
        request.weight = expects
        self._asks[shard, request.seq] = request
        self._put(request)
        return request

    def on_message(self, message: Message, now: float) -> None:
        """An answer, or a new view."""
        self.now = now
        if message.kind == MessageKind.VIEW:
            view = View.from_meta(message.meta)
            if view.epoch < self.view.epoch:
                # From a new coordinator, maybe, that nobody has told of the later one.
                # As a witness: a coordinator started anew may have lost all memory of this job, and servers may be gone
                # that knew.
                sign = {"role": "witness", "view": self.view.to_meta()}
                self._send(
                    COORDINATOR, Message(MessageKind.ALIVE, self.view.epoch, client=self.me, meta=sign)
                )
            self.change_view(view, now)
        elif message.kind == MessageKind.REPLY:
            self._take_reply(message)

    def change_view(self, view: View, now: float) -> None:
        """Act in a later view from now on: everything without an answer goes out anew."""
        self.now = now
        if view.epoch > self.view.epoch:
            self.view = view
            for request in self._under_way():
                self._put(request)

    def send_again(self, shard: int, seq: int) -> None:
        """One request, if it has no answer yet: its tensor, or that of its answer, could not be seen."""
        queue = self._calls.get(shard)
        if (shard, seq) in self._asks:
            self._put(self._asks[shard, seq])
        # Only the first of the queue has been sent.
        elif queue and queue[0].seq == seq:
            self._put(queue[0])

    def on_time(self, now: float) -> None:
        """Called often."""
        self.now = now
        for request in self._under_way():
            if now >= request.due:
                self._put(request)

    def _under_way(self) -> list[Request]:
        """What has been sent and is not answered."""
        return [queue[0] for queue in self._calls.values() if queue] + list(self._asks.values())

    def _make(
        self,
        kind: MessageKind,
        shard: int,
        name: str,
        args: object,
        clock: int,
        tensor: torch.Tensor | None,
        where: Where | None,
        then: Callable[[Request], None] | None,
    ) -> Request:
        self._seq += 1
        weight = 0 if tensor is None else tensor.nbytes
        return Request(kind, shard, self._seq, name, args, clock, tensor, where, then, weight=weight)

    def _put(self, request: Request) -> None:
        if not self.view.chains:
            return
        target = (
            self.view.head(request.shard)
            if request.kind == MessageKind.CALL
            # Chain replication: updates enter at the head; the tail answers, which knows only what all copies hold.
            else self.view.tail(request.shard)
        )
        near = self._near(target)
        # In shared memory nothing has to cross a wire, so nothing has to be waited for.
        request.weight = 0 if near else request.weight
        # On a slow wire a request is not lost while the bytes before it are still going out.
        ahead = 0 if near else sum(other.weight for other in self._under_way())  # this one among them
        request.due = self.now + (RETRY if request.kind == MessageKind.CALL else RETRY_ASK) + ahead / SLOWEST
        message = Message(
            request.kind,
            self.view.epoch,
            request.shard,
            self.me,
            request.seq,
            clock=request.clock,
            meta=[request.name, request.args],
            tensor=request.tensor,
            where=request.where,
            codec=request.codec,
        )
        self._send(target, message)

    def _take_reply(self, message: Message) -> None:
        if message.epoch != self.view.epoch:
            return  # who has an answer must know the view that it holds in; it is asked for again
        request = self._asks.pop((message.shard, message.seq), None)
        if request is None:
            queue = self._calls.get(message.shard)
            if not queue or queue[0].seq != message.seq:
                return  # answered before
            request = queue.popleft()
            if queue:
                self._put(queue[0])
        status, value = message.meta
        if status == REFUSED:
            request.refusal = str(value)
        request.answer = Answer(value, message.tensor, message.where)
        request.done = True
        if request.then is not None:
            request.then(request)
