"""First values go from worker to worker along a tree of hosts; whoever gets none there asks the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.server.client.connection as link_file
from shoal.errors import ConfigError
from shoal.server.client.weight_broadcast import Lent, own_address
from shoal.server.processes import Threads
from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.replication.coordinator import Coordinator
from shoal.server.replication.membership import Worker, source_of
from shoal.server.transport.keys import JobKeys
from shoal.testing.hosts import Hosts, make_hosts
from shoal.testing.parity import run_toy, take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.launch import Launch
from shoal.world.world import World

NOBODY = "tcp://10.77.0.99:1"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with make_hosts(4) as made:
            yield made
    except ConfigError as reason:
        pytest.skip(f"cannot make hosts here: {reason}")


def work(world: World, hosts: Hosts, where: list[int], keys: Path, fault: str) -> dict[str, Any]:
    """Be a worker on a host, as `shoal run` would start it: it meets the others at servers only.

    `fault`: what is wrong with the second worker.
    """
    rank = world.rank
    if fault:
        link_file.LENDER_SECONDS = 0.5
    hosts.enter(where[rank])
    servers = None
    if rank == 0:
        JobKeys.make().write(keys)
        servers = Threads(2, JobKeys.read(keys), f"tcp://{hosts.addresses[0]}:*", world.size)
    at = world.gather_values(servers and servers.address.removeprefix("tcp://"))[0]
    unjoined = World.unjoined(Launch(rank=rank, size=world.size))
    parts = toy_parts(unjoined, TOYS["stack"], f"ps(bucket_mb=0.01, at={at}, keys={keys})")
    exchange = parts.exchange
    link = exchange.link  # type: ignore[attr-defined]
    wire = link._transport.wire
    if rank == 1 and fault == "unreachable":
        link._address = NOBODY
    elif rank == 1 and fault == "empty":
        link.lent.end()
    for parameter in parts.model.parameters() if rank else ():
        parameter.data.zero_()  # what follows must come from elsewhere
    met = {me: number for number, me in enumerate(world.gather_values(link.me))}
    addresses = set(world.gather_values(link._address))
    while servers is not None and {w.address for w in known_to(servers)} != addresses:
        time.sleep(0.02)  # until everybody's sign of life has come
    world.barrier()
    if rank == 1 and fault == "late":
        time.sleep(2.0)
    before = wire.received_bytes
    exchange.start(0, None)
    told = {
        "listens": wire.address,
        "lender": met.get(link._lender),
        "came": (wire.received_bytes - before) / sum(bucket.nbytes for bucket in exchange.buckets),  # type: ignore[attr-defined]
        "fresh": exchange._fresh,  # type: ignore[attr-defined]
        "losses": [take_step(parts, number).loss for number in range(2)],
    }
    exchange.close()
    if servers is not None:
        servers.close()
    return told


def known_to(servers: Threads) -> list[Worker]:
    assert servers._coordinator is not None
    return list(servers._coordinator.workers.values())


def solo_losses(workers: int) -> list[float]:
    toy = TOYS["stack"]
    return run_toy(World.alone(), toy, "solo", 2, accumulate=workers * toy.accumulate).losses


def test_along_a_tree_of_hosts(hosts: Hosts, tmp_path: Path) -> None:
    where = [0, 1, 1, 2, 3]
    found = spawn(work, 5, hosts, where, tmp_path / "keys", "")
    for host, said in zip(where, found, strict=True):
        assert said["listens"].startswith(f"tcp://{hosts.addresses[host]}:"), "there, and nowhere else"
        assert said["losses"] == pytest.approx(solo_losses(5), rel=1e-12)
    assert [said["lender"] for said in found] == [None, 0, 1, 0, 1], "a host serves two others, and its own"
    assert [said["fresh"] for said in found] == [0] * 5, "nobody fetches them once more"
    came = [said["came"] for said in found]
    assert min(came[1], came[3], came[4]) > 1.0, "over the wire, from another host"
    assert max(came[0], came[2]) < 0.5, "made here, or read in the memory of the host"


@pytest.mark.parametrize("fault", ["unreachable", "empty", "late"])
def test_who_gets_none_asks_the_servers(hosts: Hosts, tmp_path: Path, fault: str) -> None:
    found = spawn(work, 3, hosts, [0, 1, 1], tmp_path / "keys", fault)
    assert [said["lender"] for said in found] == [None, 0, 1]
    assert found[2]["fresh"] == 0
    assert 1.0 < found[2]["came"] < 1.5, "over the wire, from the servers, and once"
    for said in found:
        assert said["losses"] == pytest.approx(solo_losses(3), rel=1e-12)


def worker(rank: int, address: str = "tcp://10.0.0.1:1") -> Worker:
    return Worker(0.0, rank, address=address)


def test_sources_have_lower_ranks_and_few_who_ask() -> None:
    apart = 1 << 39  # numbers that differ by so much are of different hosts
    known = {2**16 + host * apart + n: worker(host * 3 + n) for host in range(9) for n in range(3)}
    served: dict[int, list[int]] = {}
    for me, mine in known.items():
        found = source_of(me, known)
        if mine.rank == 0:
            assert found is None
            continue
        assert found is not None
        source, address, lends = found
        assert known[source].rank < mine.rank
        assert address == known[source].address
        assert lends == (mine.rank % 3 == 0), "the first of a host has others to serve"
        served.setdefault(known[source].rank, []).append(mine.rank)
    assert served[0] == [1, 2, 3, 6]
    assert served[3] == [4, 5, 9, 12]
    assert all(len([rank for rank in ranks if rank % 3 == 0]) <= 2 for ranks in served.values())


def test_nobody_is_sent_to_one_that_cannot_be_reached() -> None:
    known = {2**16: worker(0, ""), 2**16 + 1: worker(1), 2**16 + 2: worker(2, "")}
    assert source_of(2**16 + 1, known) is None
    found = source_of(2**16 + 2, known)
    assert found is not None
    assert found[0] == 2**16 + 1


def test_no_values_yet_then_values_then_none_any_more() -> None:
    lent, question = Lent(5), Message(MessageKind.ASK, shard=1, client=7, seq=3, meta=["values", {"of": 5}])
    assert lent.answer(question, 0.0).meta == [0, {"wait": True, "begun": False}]
    lent.begun = True
    assert lent.answer(question, 0.0).meta == [0, {"wait": True, "begun": True}]
    values = torch.arange(5.0)
    lent.add(12, 1, values, 0.0)
    values.zero_()  # training goes on, and what is lent stays
    said = lent.answer(question, 1.0)
    assert (said.kind, said.client, said.seq, said.meta) == (MessageKind.REPLY, 7, 3, [0, {"step": 12}])
    assert said.tensor is not None
    assert said.tensor.tolist() == [0, 1, 2, 3, 4]
    assert lent.answer(replace(question, shard=2), 1.0).meta[1]["wait"], "it may still come"
    asked = lent.answer(replace(question, meta=["lends", {"of": 5}]), 1.0)
    assert (asked.meta, asked.tensor, asked.where) == ([0, {"step": 12}], None, None)
    assert lent.answer(replace(question, meta=["values", {"of": 6}]), 1.0).meta == [0, {}], (
        "another was meant"
    )
    lent.on_time(5.9)
    assert not lent.over, "it was asked for five seconds ago"
    lent.on_time(6.1)
    assert lent.answer(question, 7.0).meta == [0, {"wait": False, "begun": True}]


def test_a_worker_in_anothers_place_is_not_sent_to_that_one() -> None:
    sent: list[Message] = []
    coordinator = Coordinator(1, lambda _, message: sent.append(message))

    def says(who: int, rank: int) -> None:
        told = {
            "role": "worker",
            "rank": rank,
            "held": 0.0,
            "terms": None,
            "address": f"tcp://10.0.0.1:{who}",
        }
        coordinator.on_message(who, Message(MessageKind.ALIVE, client=who, meta=told), 0.0)

    first, dead, heir = 2**16, 2**16 + 1, 2**16 + 2
    says(dead, 0)
    says(heir, 0)
    says(first, 1)
    sent.clear()
    coordinator.on_message(first, Message(MessageKind.ASK, client=first, seq=4, meta=["source", None]), 0.0)
    assert [(m.kind, m.seq, m.meta) for m in sent] == [
        (MessageKind.REPLY, 4, [0, (heir, f"tcp://10.0.0.1:{heir}", False)])
    ]
    coordinator.on_message(first, Message(MessageKind.ASK, client=first, seq=5, meta=["values", None]), 0.0)
    assert len(sent) == 1, "it has no values"


def test_workers_listen_only_where_servers_are_elsewhere() -> None:
    assert own_address("tcp://127.0.0.1:7077") is None
    assert own_address("tcp://localhost:7077") is None
    assert own_address("ipc:///tmp/servers") is None
    assert own_address("inproc://here") is None
