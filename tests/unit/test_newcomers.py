"""Servers that catch up with a chain: nobody waits for them, and they count only with all that others were answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shoal.server.node import Node
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind
from shoal.server.protocol.session import OK
from shoal.server.protocol.state_machine import Answer, Machine, Operation
from shoal.server.protocol.view import View
from shoal.server.replication.chain import Chain
from shoal.server.replication.handover import RESEND_SNAPSHOT
from shoal.server.transport.shm_transport import ShmTransport, new_id
from shoal.server.transport.slabs import Slab
from shoal.server.transport.sockets import Wire

A, B, C, CLIENT = 7, 8, 9, 99


class Tape(Machine):
    """Remembers what was done to it."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def apply(self, op: Operation) -> Answer:
        self.done.append(int(op.args))
        return Answer(len(self.done))

    def answer(self, op: Operation) -> Answer:
        del op
        return Answer(list(self.done))

    def snapshot(self) -> tuple[Any, torch.Tensor]:
        return list(self.done), torch.zeros(400, dtype=torch.uint8)

    def restore(self, value: Any, tensor: torch.Tensor) -> None:
        del tensor
        self.done = list(value)


class Line:
    """Servers of one shard; messages between them are delivered, or lost, when the test says so."""

    def __init__(self, *servers: int) -> None:
        self.queue: deque[tuple[int, int, Message]] = deque()
        self.told: list[Message] = []
        self.chains = {who: Chain(who, 0, Tape(), self._sender(who)) for who in servers}
        self.epoch, self.seq, self.now = 0, 0, 0.0

    def _sender(self, who: int) -> Callable[[int, Message], None]:
        return lambda target, message: self.queue.append((who, target, message))

    def view(self, chain: tuple[int, ...], *newcomers: int, skipped: int = 0) -> None:
        """The next view; `skipped`: so many before it got to nobody here, and newcomers have come in this one."""
        self.epoch += 1 + skipped
        since = dict.fromkeys(newcomers, self.epoch)
        view = View(self.epoch, (chain,), since=since if skipped else {}, newcomers=(newcomers,))
        for who in (*chain, *newcomers[:1]):
            self.chains[who].change_view(view, self.now)

    def call(self, number: int, tensor: torch.Tensor | None = None) -> None:
        """A client has the head do something."""
        self.seq += 1
        head = next(chain for chain in self.chains.values() if chain.at.is_head and chain.epoch == self.epoch)
        message = Message(
            MessageKind.CALL, self.epoch, client=CLIENT, seq=self.seq, meta=["add", number], tensor=tensor
        )
        head.on_call(CLIENT, message, self.now)

    def fill(self, who: int) -> None:
        """It is the newcomer's turn."""
        if not self.chains[who].handover.open:
            self.chains[who].send_snapshot(self.now)

    def ask(self, who: int) -> list[int] | None:
        self.seq += 1
        ask = Message(MessageKind.ASK, self.epoch, client=CLIENT, seq=self.seq, meta=["done", None])
        self.chains[who].on_ask(CLIENT, ask)
        self.deliver()
        found = [message.meta for message in self.told if message.seq == self.seq]
        return found[0][1] if found else None

    def deliver(self, lost: Callable[[int, int, Message], bool] = lambda *_: False) -> None:
        while self.queue:
            source, target, message = self.queue.popleft()
            if target == CLIENT:
                self.told.append(message)
            elif message.epoch == self.epoch and target in self.chains and not lost(source, target, message):
                chain = self.chains[target]
                if message.kind == MessageKind.FORWARD:
                    chain.on_forward(message, self.now)
                elif message.kind == MessageKind.COMMIT:
                    chain.on_commit(source, message, self.now)
                elif message.kind == MessageKind.SNAPSHOT:
                    chain.on_snapshot(message, self.now)

    def answered(self) -> list[int]:
        """The calls that a client has an answer to."""
        return [message.seq for message in self.told if message.meta[0] == OK]

    def done(self, who: int) -> list[int]:
        machine = self.chains[who].machine
        assert isinstance(machine, Tape)
        return machine.done


def started() -> Line:
    """One server that has done something, and another that is to join it."""
    line = Line(A, B)
    line.chains[A].whole = True
    line.view((A,))
    line.call(1)
    line.view((A,), B)
    line.deliver()
    return line


def test_nobody_waits_for_a_newcomer() -> None:
    line = started()
    line.fill(A)
    line.call(2)
    line.deliver(lost=lambda _, target, __: target == B)
    assert line.answered() == [1, 2]
    assert line.ask(A) == [1, 2]
    assert line.done(B) == []
    assert not line.chains[A].caught_up


def test_it_gets_what_is_done_after_its_snapshot_too() -> None:
    line = started()
    line.fill(A)
    line.call(2)
    line.call(3)
    line.deliver()
    assert line.done(B) == [1, 2, 3]
    assert line.chains[A].caught_up
    assert not line.chains[B].whole
    assert line.ask(B) is None


def test_it_answers_only_with_all_that_others_were_answered() -> None:
    line = started()
    line.fill(A)
    line.deliver()
    line.call(2)
    line.deliver(lost=lambda _, target, __: target == B)  # acknowledged, and not there
    line.view((A, B))
    line.deliver(lost=lambda _, target, message: target == B and message.kind == MessageKind.FORWARD)
    assert not line.chains[B].whole
    assert line.ask(B) is None
    line.now += 1.0
    line.chains[A].on_time(line.now)
    line.deliver()
    assert line.chains[B].whole
    assert line.ask(B) == [1, 2]


def test_from_then_on_it_is_waited_for() -> None:
    line = started()
    line.fill(A)
    line.deliver()
    line.view((A, B))
    line.deliver()
    before = len(line.answered())
    line.call(2)
    line.deliver(lost=lambda _, target, __: target == B)
    assert len(line.answered()) == before
    line.now += 1.0
    line.chains[A].on_time(line.now)
    line.deliver()
    assert len(line.answered()) == before + 1
    assert line.done(B) == [1, 2]


def test_a_lost_snapshot_is_sent_again() -> None:
    line = started()
    line.fill(A)
    line.deliver(lost=lambda *_: True)
    line.call(2)
    line.now += RESEND_SNAPSHOT + 1.0
    line.chains[A].on_time(line.now)
    line.deliver()
    assert line.done(B) == [1, 2]


def test_who_is_fed_by_another_begins_anew() -> None:
    line = Line(A, C, B)
    line.chains[A].whole = line.chains[C].whole = True
    line.view((A, C), B)
    line.call(1)
    line.deliver()
    line.fill(C)
    line.deliver()
    assert line.done(B) == [1]
    line.call(2)
    line.deliver(lost=lambda *_: True)  # only the head has it
    line.view((A,), B)  # and goes on alone: it counts
    line.deliver()
    assert 2 in line.answered()
    line.call(3)
    line.fill(A)
    line.deliver()
    line.call(4)
    line.deliver()
    assert line.done(B) == line.done(A) == [1, 2, 3, 4]


def test_a_snapshot_of_an_earlier_view_counts_if_the_same_server_sent_it() -> None:
    line = started()
    line.view((A,), B)
    assert line.chains[B].is_fed_by(A, line.epoch - 1)
    assert not line.chains[B].is_fed_by(A, 1), "then it was not before this one"
    assert not line.chains[B].is_fed_by(C, line.epoch)
    line.view((A, B))
    assert not line.chains[B].is_fed_by(A, line.epoch - 1), "members get it of their own view"


def test_a_newcomer_that_lags_behind_is_waited_for_before_memory_is_full() -> None:
    line = started()
    line.fill(A)
    room = line.chains[A].log_limit
    for number in range(2, 6):
        line.call(number, torch.zeros(int(room / 2), dtype=torch.uint8))
    line.deliver(lost=lambda _, target, __: target == B)
    assert line.answered() == [1, 2, 3], "as much as there is room for"
    line.now += RESEND_SNAPSHOT + 1.0
    line.chains[A].on_time(line.now)
    line.deliver()
    assert line.answered() == [1, 2, 3, 5]
    assert line.done(B) == [1, 2, 3, 4, 5]
    assert line.chains[A].handover.nbytes == 0


def test_what_a_client_shares_is_copied_for_a_newcomer() -> None:
    """Whoever is answered uses that memory again."""
    slab = Slab(64)
    shared = slab.tensor(torch.uint8, 0, 64)
    line = started()
    line.fill(A)
    message = Message(
        MessageKind.CALL,
        line.epoch,
        client=CLIENT,
        seq=2,
        meta=["add", 2],
        tensor=shared,
        where=slab.where(torch.uint8, 0, 64),
    )
    line.chains[A].on_call(CLIENT, message, 0.0)
    shared.fill_(1)
    kept = line.chains[A].handover.log[2]
    assert kept.where is None
    assert kept.tensor is not None
    assert not kept.tensor.any()


def test_who_came_anew_gets_a_snapshot_though_it_was_next_before() -> None:
    line = Line(A, B)
    line.chains[A].whole = line.chains[B].whole = True
    line.view((A, B))
    line.call(1)
    line.deliver()
    line.chains[B] = Chain(B, 0, Tape(), line._sender(B))  # a node forgets what it has when it was left out
    line.view((A,), B, skipped=1)
    line.fill(A)
    line.call(2, torch.zeros(10))
    line.deliver()
    assert line.done(B) == [1, 2]
    assert line.chains[A].caught_up


def test_what_waited_for_a_server_that_is_gone_does_not_wait_for_a_newcomer() -> None:
    line = Line(A, B, C)
    line.chains[A].whole = line.chains[B].whole = True
    line.view((A, B))
    line.call(1, torch.zeros(10))
    line.deliver(lost=lambda _, target, __: target == B)
    assert line.answered() == []
    line.view((A,), C)
    line.deliver()
    assert line.answered() == [1]


def taken(view: View, before: View | None = None) -> Node:
    """A server that has taken a view, and one before it."""
    node = Node(B, "", lambda _: Tape(), lambda *_: None)
    for one in (before, view):
        if one is not None:
            node.on_message(COORDINATOR, Message(MessageKind.VIEW, one.epoch, meta=one.to_meta()), 0.0)
    return node


def test_a_newcomer_has_nothing_whatever_it_had_before() -> None:
    first = View(1, ((A, B),), {A: "", B: ""}, ("tape",), 1, "", 2, {A: 0, B: 1}, 1, {A: 1, B: 1})
    assert taken(first).whole() == [0]
    joins = replace(first, epoch=3, chains=((A,),), newcomers=((B,),))
    assert taken(joins).whole() == [], "nobody has ever told it anything"
    assert taken(joins, before=first).whole() == [], "it was left out in a view that it does not know"


def test_a_snapshot_is_not_taken_for_another_that_lies_where_it_was() -> None:
    with Wire(new_id(), None) as one, Wire(new_id(), None) as other:
        sender, receiver = ShmTransport(one), ShmTransport(other)
        sender.know(other.me, other.address)
        for number in (1, 2, 3):
            numbers = torch.full((8192,), number, dtype=torch.uint8)
            sender.send(other.me, Message(MessageKind.SNAPSHOT, place=number, meta=number, tensor=numbers))
        found: list[Message] = []
        end = time.monotonic() + 10.0
        while not found and time.monotonic() < end:
            found += [message for _, message in receiver.receive(0.1)]
        assert [message.meta for message in found] == [3], "the memory of the others is gone"
        assert found[0].tensor is not None
        assert found[0].tensor.eq(3).all()
        sender.receive(1.0)  # that two were not seen
        assert other.me in sender._sightless
        sender.close()
        receiver.close()
