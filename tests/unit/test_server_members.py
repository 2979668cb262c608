"""What the coordinator, the ledger and the letter box do in the cases that are easy to get wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.errors import ServersLost
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.client.requests import RETRY, RETRY_ASK, SLOWEST, Client
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.node import Node
from shoal.server.processes import Threads, make_machine, sending
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind
from shoal.server.protocol.state_machine import Operation, Refused
from shoal.server.protocol.view import View
from shoal.server.replication.coordinator import GENERATION_BITS, Coordinator
from shoal.server.transport import frames as frame
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import ShmTransport, new_id, same_host
from shoal.server.transport.slabs import Slab
from shoal.server.transport.sockets import Wire
from shoal.testing.scenario import SILENCE, SimulatedJob, check
from shoal.testing.shape import JobShape


def ledger(parts: int = 2, clock: str = "bsp") -> Ledger:
    made = Ledger()
    for rank in range(parts):
        made.apply(Operation("join", args={"rank": rank, "model": None}, client=10 + rank))
    made.apply(Operation("begin", args={"join_state": None}))
    made.apply(Operation("agree", args={"parts": parts, "clocks": [[0, clock]], "backup": 0}))
    return made


def claim(machine: Ledger, rank: int, stop: int, applied: int | None = None) -> dict[str, Any]:
    args = {"applied": applied, "join_state": None, "stop": stop}
    found: dict[str, Any] = machine.apply(Operation("claim", args=args, client=10 + rank)).value
    return found


def done(machine: Ledger, step: int, rank: int) -> dict[str, Any]:
    args = {"part": rank, "total": 1.0, "count": 1.0, "used": "1"}
    found: dict[str, Any] = machine.apply(Operation("done", step, args, client=10 + rank)).value
    return found


def test_a_loop_ends_where_it_should_though_others_are_in_a_longer_one() -> None:
    machine = ledger()
    for rank in (0, 1):
        assert claim(machine, rank, stop=1)["step"] == 0
        done(machine, 0, rank)
    assert claim(machine, 0, stop=5, applied=0)["step"] == 1
    late = claim(machine, 1, stop=1, applied=0)
    assert late["step"] is None
    assert late["end"]


def test_exactly_one_completes_a_step() -> None:
    machine = ledger(clock="ssp(3)")
    for rank in (0, 1):
        claim(machine, rank, stop=4)
    assert [done(machine, 0, rank)["complete"] for rank in (1, 0)] == [False, True]


def test_who_is_at_work_is_not_replaced_by_one_who_only_said_that_it_comes() -> None:
    machine = ledger()
    for worker in (20, 9):  # 20 takes the place of 10; 9 came between them and ended, and its word was late
        machine.apply(Operation("join", args={"rank": 0, "model": None}, client=worker))
    assert claim(machine, 10, stop=2)["part"] == 0
    with pytest.raises(Refused, match="replaced by another"):
        claim(machine, 0, stop=2)
    machine.apply(Operation("lost", args={"worker": 9}, client=COORDINATOR))
    assert machine.status()["workers"] == 2
    assert [worker for worker, _ in machine.status()["ids"]] == [11, 20]
    machine.apply(Operation("join", args={"rank": 0, "model": None}, client=8))
    machine.apply(Operation("lost", args={"worker": 20}, client=COORDINATOR))
    assert machine.lost == {0}, "whether 8 goes to work, nobody knows"


def test_a_worker_that_leaves_holds_nobody_up() -> None:
    job = SimulatedJob(JobShape(seed=3, workers=3, steps=30, server_kills=0))
    job.network.run(1.0)
    leaver = job.workers[1]
    leaver.finished = True
    job.network.start(leaver.me, lambda send: _Silent(send, leaver.me))
    job.history.finished += 1
    job.run()
    check(job)


class _Silent:
    """Says goodbye, and nothing more."""

    def __init__(self, send: Any, me: int) -> None:
        self._send, self._me, self._said = send, me, False

    def on_message(self, *_: object) -> None:
        return

    def on_time(self, *_: object) -> None:
        if not self._said:
            self._said = True
            self._send(COORDINATOR, Message(MessageKind.BYE, client=self._me))


def test_servers_that_are_all_silent_for_a_while_lose_nothing() -> None:
    job = SimulatedJob(JobShape(seed=4, workers=2, steps=30, server_kills=0))
    job.network.run(0.8)
    for server in list(job.nodes):
        job.network.stop(server, 6.0)
    job.run()
    check(job)
    assert job.coordinator is not None
    assert not job.coordinator.view.failed


def test_a_server_with_the_only_copy_that_stays_silent_ends_the_job() -> None:
    """Nobody saw it end; the others live, and speak, and would wait for ever."""
    job = SimulatedJob(JobShape(seed=3, servers=2, workers=2, replicas=1, steps=200, server_kills=0))
    job.network.run(1.0)
    assert job.coordinator is not None
    victim = sorted(job.coordinator.view.addresses)[0]
    job.network.stop(victim, 5 * SILENCE)
    job.network.run(5 * SILENCE)
    assert not job.coordinator.view.failed, "it may come back, and it did"
    job.network.stop(victim, 1000.0)
    job.network.run(7 * SILENCE)
    assert "all servers that held" in job.coordinator.view.failed


def test_who_takes_over_is_told_who_has_ended_and_does_not_wait_for_them() -> None:
    chains = ((7, 8),)
    view = View(5, chains, {7: "", 8: ""}, ("ledger",), 2, "", 2, {7: 0, 8: 1}, 1, {7: 1, 8: 1})
    sent: list[tuple[int, Message]] = []
    new = Coordinator(2, lambda who, message: sent.append((who, message)))
    new.gone(8, 0.0)
    new.gone(21, 0.0)  # a worker
    told = {"role": "server", "slot": 0, "address": "", "whole": [0], "caught_up": [], "view": view.to_meta()}
    told |= {"promised": 2 << GENERATION_BITS, "at": 0.1, "load": {}}
    new.on_message(7, Message(MessageKind.ALIVE, 5, client=7, meta=told), 0.1)
    new.on_time(0.2)
    assert new.view.chains == ((7,),), "the one that is left serves alone, at once"
    question = next(m for _, m in sent if m.kind == MessageKind.ASK)
    ids = {"ids": [[21, 0], [22, 1]]}
    new.on_message(7, replace(question, kind=MessageKind.REPLY, meta=[0, ids]), 0.3)
    new.on_time(0.4)
    lost = [m.meta[1]["worker"] for _, m in sent if m.kind == MessageKind.CALL]
    assert lost == [21], "its part is free, and the other may still speak"


def test_a_worker_lost_while_there_is_no_coordinator_is_missed_by_the_next() -> None:
    job = SimulatedJob(JobShape(seed=6, workers=3, steps=30, server_kills=0))
    job.network.run(0.8)
    job.network.kill(COORDINATOR)
    job.network.kill(job.workers[2].me)
    job.history.finished += 1
    job.network.after(0.3, job._start_coordinator)
    job.run()
    check(job)


def test_a_coordinator_that_is_replaced_at_once_while_shards_move() -> None:
    for seed in range(40):
        job = SimulatedJob(JobShape(seed=seed, servers=3, workers=2, shards=3, steps=60, server_kills=0))
        job.network.after(0.5, job._make_busy)
        for at in (4.9, 5.2, 10.1):

            def swap(job: SimulatedJob = job) -> None:
                job.network.kill(COORDINATOR)
                job._start_coordinator()

            job.network.after(at, swap)
        job.run()
        check(job)


def test_an_old_view_that_comes_late_cuts_nobody_off() -> None:
    keys = JobKeys.make()
    with Wire(new_id(), keys) as server, Wire(new_id(), keys, listen=None) as mine:
        post = ShmTransport(mine)
        new = View(epoch=3, addresses={server.me: server.address})
        post._meet(new)
        post._meet(View(epoch=2, addresses={}))
        assert mine.send(server.me, Message(MessageKind.ASK))


def test_who_cannot_see_an_answer_asks_again_at_once_and_gets_bytes() -> None:
    keys, me, slab = JobKeys.make(), new_id(), Slab(64)
    with Wire(new_id(), keys) as there, Wire(me, keys, listen=None) as here:
        server, worker = ShmTransport(there), ShmTransport(here)
        worker.know(there.me, there.address)
        client = Client(me, worker.send)
        client.change_view(View(epoch=1, chains=((there.me,),), addresses={there.me: there.address}), 0.0)
        slab.tensor(torch.float32, 0, 4).fill_(3.0)
        worker.opened.tensor = lambda _: None  # type: ignore[method-assign]
        request, questions = client.ask(0, "values"), 0
        end = time.monotonic() + 10
        while not request.done and time.monotonic() < end:
            for source, message in server.receive(0.05):
                if message.kind == MessageKind.ASK:
                    questions += 1
                    tensor, where = slab.tensor(torch.float32, 0, 4), slab.where(torch.float32, 0, 4)
                    reply = Message(MessageKind.REPLY, 1, 0, me, message.seq, meta=[0, None])
                    server.send(source, replace(reply, tensor=tensor, where=where))
            for _, message in worker.receive(0.05):
                if message.kind == MessageKind.UNSEEN:
                    client.send_again(message.shard, message.seq)
                else:
                    client.on_message(message, 0.0)  # by this clock, nothing is ever late
        assert questions == 2
        assert request.answer is not None
        assert request.answer.tensor is not None
        assert request.answer.tensor.tolist() == [3.0] * 4
    slab.close()


def test_processes_of_a_host_know_each_other() -> None:
    assert same_host(new_id(), new_id())
    assert not same_host(new_id("one"), new_id("other"))
    assert not same_host(new_id(), COORDINATOR)


def test_what_is_on_its_way_is_not_sent_again_before_it_can_be_there() -> None:
    sent: list[tuple[float, int]] = []
    client = Client(
        9, lambda _, message: sent.append((client.now, message.seq)), near=lambda server: server == 1
    )
    client.change_view(View(epoch=1, chains=((1,), (2,), (2,)), addresses={1: "", 2: ""}), 0.0)
    large = torch.zeros(int(SLOWEST) // 4)  # takes a second
    for shard in (1, 2):
        client.call(shard, "stage", tensor=large)
    client.call(0, "stage", tensor=large)  # goes by memory
    client.ask(2, "values", expects=large.nbytes)
    for tenth in range(60):
        client.on_time(tenth / 10)
    again = {seq: next(at for at, other in sent[4:] if other == seq) for seq in (1, 2, 3, 4)}
    assert again[3] <= RETRY + 0.2
    assert again[1] >= RETRY + 1.0
    assert again[2] >= RETRY + 2.0
    assert again[4] >= RETRY_ASK + 3.0
    small = client.call(0, "done")
    assert small.weight == 0


def serve_where_nobody_comes(coordinator: str, ended: threading.Event) -> None:
    """A server that is well, and tells an address that nobody can reach."""
    with Wire(new_id(), None) as wire:
        post = ShmTransport(wire)
        post.know(COORDINATOR, coordinator)
        node = Node(wire.me, "tcp://127.0.0.1:1", make_machine, post.send)
        while not ended.is_set():
            for source, message in post.receive(0.02):
                node.on_message(source, message, time.monotonic())
            node.on_time(time.monotonic())


def test_a_worker_that_reaches_no_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.client.connection.UNANSWERED_SECONDS", 0.5)
    servers = Threads(0, None)
    ended = threading.Event()
    thread = threading.Thread(target=serve_where_nobody_comes, args=(servers.address, ended), daemon=True)
    thread.start()
    link = Link(new_id(), servers.address, None, 0, [[4096], ["ledger"], 1, 1, 60.0])
    try:
        with pytest.raises(ServersLost, match=r"the server at tcp://127\.0\.0\.1:1 has not answered 'join'"):
            link.run(WorkerProtocol(link.client, 0, []).join())
    finally:
        link.close()
        ended.set()
        thread.join()
        servers.close()


def test_what_cannot_be_sent_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard may be too large for a message; its server has others."""
    monkeypatch.setattr(frame, "PAYLOAD_LIMIT", 1000)
    with Wire(new_id("here"), None) as wire:
        post, peer = ShmTransport(wire), new_id("there")
        large = Message(MessageKind.SNAPSHOT, tensor=torch.zeros(1001, dtype=torch.uint8))
        send = sending(post)
        for _ in range(3):
            send(peer, large)
        with pytest.raises(frame.BadFrame):  # a worker has nothing else to do, and its user must know
            post.send(peer, large)
    said = capsys.readouterr().err
    assert said == "shoal: a SNAPSHOT cannot be sent: a tensor of 1001 bytes; at most 1000 are sent at once\n"


@pytest.mark.parametrize("address", ["nonsense", "tcp://10.1.2.3:5", 7])
def test_a_view_with_an_address_that_is_none_is_not_believed(address: object) -> None:
    with Wire(1, None) as mine, Wire(2, None, None) as other:
        other.connect(1, mine.address)
        view = View(4, ((2**16 + 7,),), addresses={2**16 + 7: address})  # type: ignore[dict-item]
        other.send(1, Message(MessageKind.VIEW, 4, meta=view.to_meta()))
        other.send(1, Message(MessageKind.READY, 4))
        post, kinds = ShmTransport(mine), list[MessageKind]()
        end = time.monotonic() + 20
        while MessageKind.READY not in kinds:
            assert time.monotonic() < end
            kinds += [message.kind for _, message in post.receive(0.1)]
        assert MessageKind.VIEW not in kinds
