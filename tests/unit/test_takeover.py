"""What a coordinator must not get wrong that takes over in the middle of something: jobs on the simulated network, each
brought into the one situation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.server.client.requests import Client
from shoal.server.node import Node
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind
from shoal.server.protocol.view import LEDGER, View
from shoal.server.replication.coordinator import GENERATION_BITS, Coordinator
from shoal.testing.scenario import SILENCE, SimulatedJob, check
from shoal.testing.shape import JobShape


def begun(seed: int, servers: int = 2, steps: int = 40) -> SimulatedJob:
    """A job in its first steps, on servers that are all whole."""
    job = SimulatedJob(JobShape(seed=seed, servers=servers, steps=steps, server_kills=0))
    job.network.run(0.5)
    assert job._recovered()
    return job


def acting_alone(seed: int, servers: int = 2) -> tuple[SimulatedJob, int, int]:
    """A server that was thought lost and is only stopped, and the other, which has made updates without it."""
    job = begun(seed, servers)
    assert job.coordinator is not None
    stopped, alone = job.coordinator.view.chains[1]
    job.network.stop(stopped, SILENCE + 1.0)
    job.network.run(SILENCE + 1.0, until=lambda: job.nodes[alone].view.chains[1] == (alone,))
    job.network.run(0.3)
    assert job.nodes[alone].chains[1].committed > job.nodes[stopped].chains[1].last
    return job, stopped, alone


def replace_coordinator(job: SimulatedJob, after: float = 0.05) -> None:
    job.network.kill(COORDINATOR)
    job.network.after(after, job._start_coordinator)


@pytest.mark.parametrize("seed", range(3))
def test_who_was_overtaken_does_not_overrule_who_went_on_alone(seed: int) -> None:
    job, _, alone = acting_alone(seed)
    replace_coordinator(job)
    job.network.stop(alone, 2 * SILENCE)  # what it has acknowledged, only the workers know
    job.run()
    check(job)


def test_a_new_coordinator_waits_for_the_only_server_that_has_a_shard() -> None:
    job, stopped, alone = acting_alone(
        0, servers=3
    )  # the third knows that the shard is there and nowhere else
    job.network.kill(stopped)
    del job.nodes[stopped]
    job._start_server(0)
    replace_coordinator(job)
    job.network.stop(alone, 2 * SILENCE)
    job.run()
    check(job)


def test_but_not_for_ever() -> None:
    job, stopped, alone = acting_alone(0)
    replace_coordinator(job)
    for server in (stopped, alone):
        job.network.kill(server)
    for slot in (0, 1):
        job._start_server(slot)
    job.network.run(10 * SILENCE)
    assert all("start again from the last checkpoint" in w.client.view.failed for w in job.workers.values())


def report(node: Node, now: float) -> Message:
    """What a server tells the coordinator at this moment."""
    sent: list[Message] = []
    send, node._send = node._send, lambda _, message: sent.append(message)
    node._say(MessageKind.ALIVE, now)
    node._send = send
    return sent[0]


def test_what_a_server_said_before_it_knew_of_a_new_coordinator_does_not_count() -> None:
    job, stopped, alone = acting_alone(0)
    now = report(job.nodes[alone], job.network.now)
    view = job.nodes[stopped].view
    before = replace(now, epoch=view.epoch, meta={**now.meta, "view": view.to_meta()})
    job.network.run(SILENCE, until=lambda: job.network.works(stopped))
    job.network.kill(COORDINATOR)
    job._start_coordinator()
    assert job.coordinator is not None
    # Both waited for somebody to listen, and together they seem to be all that the servers know.
    job.coordinator.on_message(alone, before, job.network.now)
    job.coordinator.on_message(stopped, report(job.nodes[stopped], job.network.now), job.network.now)
    job.coordinator.on_time(job.network.now)
    job.run()
    check(job)


def test_a_view_that_comes_when_its_coordinator_has_a_successor_is_not_taken() -> None:
    job = begun(0)
    node = job.nodes[min(job.nodes)]
    late = replace(node.view, epoch=node.view.epoch + 1, chains=((node.me,),) * len(node.view.chains))
    replace_coordinator(job)
    job.network.run(0.3, until=lambda: node._promised > late.epoch)
    before = node.view
    assert before.epoch < late.epoch
    node.on_message(COORDINATOR, Message(MessageKind.VIEW, late.epoch, meta=late.to_meta()), job.network.now)
    assert node.view == before


def answers(job: SimulatedJob, server: int) -> bool:
    """Whether a server answers a question that is asked in the view it knows."""
    heard: list[Message] = []
    job.network.start(99, lambda _: _Listener(heard))
    ask = Message(MessageKind.ASK, job.nodes[server].view.epoch, 1, 99, 1, meta=["values", {"applied": 0}])
    job.nodes[server].on_message(99, ask, job.network.now)
    job.network.run(0.01)
    return [message.kind for message in heard] == [MessageKind.REPLY]


def test_a_server_that_was_stopped_answers_nothing_until_the_coordinator_has_heard_it_again() -> None:
    job = begun(0)
    assert job.coordinator is not None
    head, tail = job.coordinator.view.chains[1]
    assert answers(job, tail)
    last = report(job.nodes[tail], job.network.now)
    job.network.stop(tail, SILENCE + 0.5)
    job.coordinator.on_message(tail, last, job.network.now)  # what it says to that waits for the server
    job.network.run(SILENCE + 0.5, until=lambda: job.network.works(tail))
    assert job.nodes[head].view.chains[1] == (head,), "the others should have gone on"
    job.network.run(0.0005)
    assert not answers(job, tail)
    job.run()
    check(job)


def test_a_question_waits_for_the_coordinators_word() -> None:
    job = begun(0)
    assert job.coordinator is not None
    tail = job.coordinator.view.tail(1)
    heard: list[Message] = []
    job.network.start(98, lambda _: _Listener(heard))
    job.nodes[tail]._heard = -1e9  # as in a server that has just come
    ask = Message(MessageKind.ASK, job.nodes[tail].view.epoch, 1, 98, 1, meta=["values", {"applied": 0}])
    job.nodes[tail].on_message(98, ask, job.network.now)
    assert not heard
    job.network.run(0.3)
    assert [message.kind for message in heard] == [MessageKind.REPLY]


def test_a_coordinator_that_may_not_know_the_newest_view_lets_nobody_answer_by_an_older_one() -> None:
    job = begun(0)
    assert job.coordinator is not None
    head, tail = job.coordinator.view.chains[1]
    job.network.stop(head, 2 * SILENCE)  # it may have gone on alone, for all that the next one knows
    replace_coordinator(job)
    assert answers(job, tail)
    job.network.run(0.75 * SILENCE)
    assert not answers(job, tail)
    job.run()
    check(job)


def test_an_answer_counts_with_the_view_that_it_holds_in() -> None:
    sent: list[Message] = []
    client = Client(9, lambda _, message: sent.append(message))
    views = [View(epoch=epoch, chains=((1,),), addresses={1: ""}) for epoch in (1, 2)]
    client.change_view(views[0], 0.0)
    request = client.call(LEDGER, "done")
    reply = Message(MessageKind.REPLY, 2, LEDGER, 9, request.seq, meta=[0, None])
    client.on_message(reply, 0.1)
    assert not request.done, "who has it could not tell anybody in which view it was given"
    client.on_message(Message(MessageKind.VIEW, 2, meta=views[1].to_meta()), 0.2)
    assert [message.epoch for message in sent] == [1, 2]
    client.on_message(reply, 0.3)
    assert request.done


class _Listener:
    def __init__(self, heard: list[Message]) -> None:
        self._heard = heard

    def on_message(self, source: int, message: Message, now: float) -> None:
        del source, now
        self._heard.append(message)

    def on_time(self, now: float) -> None:
        del now


def test_a_job_begins_though_only_a_worker_has_heard_so() -> None:
    job = SimulatedJob(JobShape(seed=0, server_kills=0))
    job._fuses.append(0)
    job.network.run(1.0, until=lambda: job.history.cuts > 0)
    assert job.coordinator is not None
    first, client = job.coordinator.view, job.workers[1].client
    job.network.run(2.0, until=lambda: all(node._promised > first.epoch for node in job.nodes.values()))
    client.on_message(Message(MessageKind.VIEW, first.epoch, meta=first.to_meta()), job.network.now)
    job.run()
    check(job)
    assert job.coordinator.view.born == first.epoch


def test_what_a_server_had_before_it_was_left_out_is_not_counted() -> None:
    older = View(1, ((8, 7),), {8: "", 7: ""}, ("ledger",), 2, "", 2, {8: 0, 7: 1}, 1, {8: 1, 7: 1})
    newer = replace(older, epoch=3, chains=((7, 8),), since={7: 1, 8: 3})
    new = Coordinator(2, lambda *_: None)

    def says(server: int, view: View, whole: list[int]) -> None:
        told = {
            "role": "server",
            "slot": 0,
            "address": "",
            "whole": whole,
            "caught_up": [],
            "view": view.to_meta(),
        }
        told |= {"promised": 2 << GENERATION_BITS, "at": 0.0, "load": {}}
        new.on_message(server, Message(MessageKind.ALIVE, view.epoch, client=server, meta=told), 0.0)

    says(8, older, [0])
    assert new.servers[8].whole == {0}
    says(7, newer, [0])
    assert new.servers[8].whole == set()
    says(8, older, [0])
    assert new.servers[8].whole == set()
    new.on_time(0.1)
    assert new.view.chains == ((7, 8),)


def test_a_silent_server_is_not_given_up_for_one_that_has_just_ended() -> None:
    job = begun(1)
    assert job.coordinator is not None
    known, (silent, ended) = job.coordinator.servers, job.coordinator.view.chains[1]
    job.network.stop(silent, SILENCE + 0.5)
    job.network.run(SILENCE + 0.5, until=lambda: job.network.now - known[silent].heard > SILENCE)
    assert silent in known, "it should not have been looked at since"
    job._end_server(ended)
    job.coordinator.gone(ended, job.network.now)
    job.run()
    check(job)


class Takeover:
    """A coordinator after another one, and what it has sent."""

    dead = View(5, ((7, 8),), {7: "", 8: ""}, ("ledger",), 2, "", 2, {7: 0, 8: 1}, 1, {7: 1, 8: 1})

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.made = Coordinator(2, lambda who, message: self.sent.append((who, message)))
        self.made.on_time(0.0)

    def server(self, who: int, view: View, now: float) -> None:
        told = {"role": "server", "slot": who % 10, "address": "", "whole": [0] if view.epoch else []}
        told |= {
            "view": view.to_meta(),
            "promised": 2 << GENERATION_BITS,
            "at": now,
            "load": {},
            "caught_up": [],
        }
        self.made.on_message(who, Message(MessageKind.ALIVE, view.epoch, client=who, meta=told), now)

    def worker(self, who: int, epoch: int, now: float) -> None:
        told = {"role": "worker", "rank": 0, "held": 0.0, "terms": [[64], ["ledger"], 2, 2, 60.0]}
        self.made.on_message(who, Message(MessageKind.ALIVE, epoch, client=who, meta=told), now)

    def witness(self, who: int, now: float) -> None:
        told = {"role": "witness", "view": self.dead.to_meta()}
        self.made.on_message(who, Message(MessageKind.ALIVE, 5, client=who, meta=told), now)


def test_no_new_job_is_begun_over_one_whose_servers_are_on_their_way() -> None:
    new = Takeover()
    for server in (11, 12):  # fresh ones
        new.server(server, View(), 0.1)
    new.worker(30, 5, 1.9)
    new.made.on_time(2.5)
    assert not new.made.view.chains
    for server in (7, 8):
        new.server(server, new.dead, 3.0)
    new.made.on_time(3.1)
    assert new.made.view.chains == ((7, 8),)
    assert new.made.view.born == 1


def test_a_worker_of_a_job_that_is_gone_holds_nobody_up() -> None:
    new = Takeover()
    for server in (11, 12):
        new.server(server, View(), 0.1)
    new.worker(30, 5, 0.2)
    new.witness(30, 0.3)
    now = 10.3
    for server in (11, 12):
        new.server(server, View(), now)
    new.made.on_time(now)
    new.sent.clear()
    new.worker(30, 5, now + 0.1)
    ((who, said),) = new.sent
    assert who == 30
    assert "have ended; start again from the last checkpoint" in View.from_meta(said.meta).failed
    assert said.epoch > 5
    new.worker(31, 0, now + 0.2)
    new.made.on_time(now + 0.3)
    assert set(new.made.view.addresses) == {11, 12}, "who comes anew gets servers"
