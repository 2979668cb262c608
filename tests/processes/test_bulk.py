"""Sealed tensors between real sockets: they go another way than the rest, nobody reads or makes them, and nothing is
lost where that way does not work."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
import zmq

from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.transport import bulk, inbox, sockets
from shoal.server.transport.bulk import Bulk, name_of
from shoal.server.transport.cipher import Part, seal
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.sockets import Wire

SERVER, WORKER = 1, 256
SIZE = 1 << 20
"""Numbers of a tensor: 4 MB."""


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys.make()


@pytest.fixture
def pair(keys: JobKeys) -> Iterator[tuple[Wire, Wire]]:
    """Who listens, and who connects to it."""
    with Wire(SERVER, keys) as server, Wire(WORKER, keys, None) as worker:
        worker.connect(SERVER, server.address)
        yield server, worker


def tensor(seq: int) -> Message:
    return Message(MessageKind.CALL, seq=seq, tensor=torch.full((SIZE,), float(seq)))


def bulk_of(wire: Wire) -> Bulk:
    assert wire._bulk is not None
    return wire._bulk


def gather(
    wires: tuple[Wire, ...], enough: Callable[[list[Message]], bool], timeout: float = 30
) -> list[Message]:
    """Receive on all of these until it is enough; every tensor is as it was sent."""
    got: list[Message] = []
    end = time.monotonic() + timeout
    while not enough(got):
        assert time.monotonic() < end, f"after {timeout} s there are {[m.seq for m in got]}"
        for wire in wires:
            for _, message in wire.receive(0.005):
                if message.tensor is not None:
                    assert torch.equal(message.tensor, torch.full((SIZE,), float(message.seq)))
                got.append(message)
    return got


def has(*numbers: int) -> Callable[[list[Message]], bool]:
    return lambda got: set(numbers) <= {message.seq for message in got}


def agree(server: Wire, worker: Wire) -> None:
    """Send one tensor each way, and wait until the next ones will be sealed."""
    worker.send(SERVER, tensor(900))
    gather((server, worker), has(900))
    server.send(WORKER, tensor(901))
    gather((server, worker), has(901))
    gather((server, worker), lambda _: server.seals(WORKER, tensor(0)) and worker.seals(SERVER, tensor(0)))


@contextlib.contextmanager
def relay(port: int, seen: bytearray, stop: threading.Event, ends: list[socket.socket]) -> Iterator[int]:
    """A port that leads to another; what passes is kept, and nothing does after `stop`. `ends` get its connections."""
    front = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not stop.is_set():
                    seen.extend(data)
                    target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = front.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend([near, far])
                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                threading.Thread(target=copy, args=(near, far), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield front.getsockname()[1]
    finally:
        for end in (front, *ends):
            end.close()


@contextlib.contextmanager
def relayed(server: Wire, seen: bytearray, stop: threading.Event) -> Iterator[list[socket.socket]]:
    """Whoever asks `server` for its second way is sent through a relay, whose connections these are."""
    way, ends = bulk_of(server), list[socket.socket]()
    with relay(way._port, seen, stop, ends) as port:
        way._port = port
        yield ends


def test_tensors_take_the_second_way_in_order_with_the_rest(pair: tuple[Wire, Wire]) -> None:
    server, worker = pair
    seen = bytearray()
    with relayed(server, seen, threading.Event()):
        agree(server, worker)
        del seen[:]
        for wire, peer in ((worker, SERVER), (server, WORKER)):
            first = 10 if wire is worker else 20
            for seq in range(first, first + 6):
                assert wire.send(peer, tensor(seq) if seq % 2 else Message(MessageKind.CALL, seq=seq))
        got = gather(pair, has(*range(10, 16), *range(20, 26)))
    for first in (10, 20):
        assert [m.seq for m in got if first <= m.seq < first + 6] == list(range(first, first + 6))
    sealed = 6 * 4 * SIZE
    assert sealed < len(seen) < 1.01 * sealed
    assert torch.full((16,), 11.0).numpy().tobytes() not in seen, "what passes can be read"


def test_a_way_that_is_agreed_on_ahead(keys: JobKeys) -> None:
    """The very first tensor is sealed."""
    with Wire(SERVER, keys) as server, Wire(WORKER, keys, None) as worker:
        worker.connect(SERVER, server.address, ahead=True)
        gather(
            (server, worker), lambda _: worker.seals(SERVER, tensor(0)) and server.seals(WORKER, tensor(0))
        )


def test_small_tensors_and_those_without_keys_stay_where_they_are(pair: tuple[Wire, Wire]) -> None:
    agree(*pair)
    few = Message(MessageKind.CALL, tensor=torch.zeros(100))
    assert not pair[1].seals(SERVER, few)
    with Wire(SERVER, None) as server, Wire(WORKER, None, None) as worker:
        worker.connect(SERVER, server.address)
        worker.send(SERVER, tensor(1))
        gather((server, worker), has(1))
        assert not worker.seals(SERVER, tensor(1))


@pytest.mark.parametrize("without", [SERVER, WORKER])
def test_where_one_side_cannot_seal_curve_carries_tensors(
    keys: JobKeys, monkeypatch: pytest.MonkeyPatch, without: int
) -> None:
    """`cryptography` is an extra: one host may have it and another may not."""
    monkeypatch.setattr(sockets, "can_seal", lambda: without != SERVER)
    with Wire(SERVER, keys) as server:
        monkeypatch.setattr(sockets, "can_seal", lambda: without != WORKER)
        with Wire(WORKER, keys, None) as worker:
            worker.connect(SERVER, server.address, ahead=True)
            for seq in range(3):
                worker.send(SERVER, tensor(seq))
                gather((server, worker), has(seq))
                server.send(WORKER, tensor(10 + seq))
                gather((server, worker), has(10 + seq))
            assert not worker.seals(SERVER, tensor(0))
            assert not server.seals(WORKER, tensor(0))


def test_memory_may_change_once_a_sealed_tensor_is_sent(pair: tuple[Wire, Wire]) -> None:
    server, worker = pair
    agree(server, worker)
    message = tensor(5)
    assert worker.seals(SERVER, message)
    worker.send(SERVER, message)
    assert message.tensor is not None
    message.tensor.fill_(-1.0)
    gather(pair, has(5))


def test_a_port_that_is_told_again_loses_nothing(pair: tuple[Wire, Wire]) -> None:
    """Both may begin to agree at the same time: then it is told twice."""
    server, worker = pair
    agree(server, worker)
    for seq in range(5):
        worker.send(SERVER, tensor(seq))
        bulk_of(server)._tell(WORKER)
        worker.receive(0.05)
    gather(pair, has(*range(5)), timeout=inbox.PATIENCE / 2)


def test_where_the_second_way_is_blocked_the_first_one_carries_all(pair: tuple[Wire, Wire]) -> None:
    server, worker = pair
    with socket.create_server(("127.0.0.1", 0)) as held:
        bulk_of(server)._port = held.getsockname()[1]  # somebody listens there and never says a word
        for seq in range(3):
            worker.send(SERVER, tensor(seq))
            server.send(WORKER, tensor(10 + seq)) if seq else None
            gather(pair, has(seq, 10 + seq) if seq else has(seq))
        assert not worker.seals(SERVER, tensor(0))
        assert not server.seals(WORKER, tensor(0))


def test_a_way_that_breaks_is_given_up(pair: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PATIENCE", 0.5)
    server, worker = pair
    stop = threading.Event()
    with relayed(server, bytearray(), stop):
        agree(server, worker)
        stop.set()
        worker.send(SERVER, tensor(1))  # lost: whoever sent it will do so again
        worker.send(SERVER, Message(MessageKind.CALL, seq=2))
        assert 1 not in {message.seq for message in gather(pair, has(2))}
        gather(pair, lambda _: not worker.seals(SERVER, tensor(0)))
        worker.send(SERVER, tensor(3))
        gather(pair, has(3))


@pytest.mark.parametrize("speaker", [WORKER, SERVER])
def test_a_connection_that_is_hung_up_is_made_anew(
    pair: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch, speaker: int
) -> None:
    """Its word has been used, so it does not come back by itself; whoever speaks first finds out."""
    monkeypatch.setattr(inbox, "PATIENCE", 0.5)
    monkeypatch.setattr(bulk, "_AGAIN", 0.2)
    monkeypatch.setattr(bulk, "_LOST", 0.2)
    server, worker = pair
    wire, peer = (worker, SERVER) if speaker == WORKER else (server, WORKER)
    with relayed(server, bytearray(), threading.Event()) as ends:
        agree(server, worker)
        for seq in range(10, 13):  # more than once
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            got: list[Message] = []
            limit = time.monotonic() + 30
            while seq not in {message.seq for message in got}:  # what is lost is sent again, as ever
                assert time.monotonic() < limit, "nothing comes through any more"
                wire.send(peer, tensor(seq))
                for some in pair:
                    got += [message for _, message in some.receive(0.1)]
            while not (server.seals(WORKER, tensor(0)) and worker.seals(SERVER, tensor(0))):
                assert time.monotonic() < limit, "there is no second way any more"
                for some, other in ((worker, SERVER), (server, WORKER)):
                    some.send(other, tensor(seq))
                    some.receive(0.05)


def test_a_way_may_be_given_up_while_pieces_lie_on_it(pair: tuple[Wire, Wire]) -> None:
    """Both sockets have something in the same round, and what the first one says closes the second."""
    server, worker = pair
    agree(server, worker)
    server.send(WORKER, tensor(1))
    server._say(WORKER, False)
    _, way = bulk_of(worker)._dealers[SERVER]
    _, curve = worker._dealers[SERVER]
    assert way.poll(5000)
    assert curve.poll(5000)
    gather(pair, lambda _: way.closed)
    worker.send(SERVER, tensor(2))
    gather(pair, has(2))


def test_one_direction_that_is_blocked_leaves_the_other_alone(pair: tuple[Wire, Wire]) -> None:
    """The worker says that the server's pieces do not come; its own go on as before, and at once."""
    server, worker = pair
    agree(server, worker)
    worker._say(SERVER, False)
    gather(pair, lambda _: not server.seals(WORKER, tensor(0)))
    assert worker.seals(SERVER, tensor(1))
    worker.send(SERVER, tensor(1))
    server.send(WORKER, tensor(2))
    gather(pair, has(1, 2), timeout=inbox.PATIENCE / 2)


def knock(server: Wire, name: bytes, word: bytes = b"") -> zmq.Socket[bytes]:
    """A stranger at the second door; if it has no `word`, it has stolen one that nobody has used."""
    if not word:
        word = b"stolen"
        bulk_of(server)._words.add(word)
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.SNDHWM, 16)  # what waits to be sent is memory of this process too
    stranger.setsockopt(zmq.ROUTING_ID, name)
    stranger.setsockopt(zmq.PLAIN_USERNAME, b"shoal")
    stranger.setsockopt(zmq.PLAIN_PASSWORD, word)
    stranger.connect(f"tcp://127.0.0.1:{bulk_of(server)._port}")
    return stranger


def test_a_stranger_at_the_second_door_gets_nothing_and_does_no_harm(
    pair: tuple[Wire, Wire],
) -> None:
    """One without a word is not let in; one who has stolen one can knock and talk, and is not believed."""
    server, worker = pair
    agree(server, worker)
    received = server.received_bytes
    outside, inside = knock(server, name_of(77), b"guess"), knock(server, name_of(78))
    try:
        outside.send(bytes(1000))
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert server.receive(0.01) == []
        # Less than was sent: the rest of what two wires say to each other inside CURVE may still come in.
        assert server.received_bytes - received < 1000, "who has no word has been heard"
        before = psutil.Process().memory_info().rss
        inside.send(b"")  # a knock of somebody whom CURVE does not know
        left = 4000
        while left:
            with contextlib.suppress(zmq.Again):
                inside.send(bytes(100_000), zmq.NOBLOCK)
                left -= 1
            assert server.receive(0) == []
        gather(pair, lambda _: server.received_bytes - received >= 4000 * 100_000)
        assert psutil.Process().memory_info().rss - before < 150 << 20
        assert not server.seals(78, tensor(0))
        worker.send(SERVER, tensor(1))
        gather(pair, has(1))
        assert worker.seals(SERVER, tensor(0))
        assert inside.poll(100) == 0, "something was sent to a stranger"
    finally:
        outside.close()
        inside.close()


def test_a_stranger_who_takes_a_worker_s_name_stops_nothing(
    pair: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the worker's pieces, which it cannot open; the worker says that none come, and CURVE carries them."""
    monkeypatch.setattr(inbox, "PATIENCE", 0.5)
    server, worker = pair
    agree(server, worker)
    thief = knock(server, name_of(WORKER))
    try:
        thief.send(b"")
        end = time.monotonic() + 20
        seq = 0
        while server.seals(WORKER, tensor(0)) or not seq:
            seq += 1
            assert time.monotonic() < end, "the server goes on sending to a thief"
            server.send(WORKER, tensor(seq))
            for wire in pair:
                wire.receive(0.1)
        server.send(WORKER, tensor(5000))
        gather(pair, has(5000))
    finally:
        thief.close()


def test_a_word_lets_one_connection_in(pair: tuple[Wire, Wire]) -> None:
    """Who taps the network reads it when it has been used."""
    server, worker = pair
    agree(server, worker)
    first, second = knock(server, name_of(78), b"once"), knock(server, name_of(79), b"once")
    bulk_of(server)._words.add(b"once")
    try:
        received = server.received_bytes
        for stranger in (first, second):
            stranger.send(bytes(1000))
        gather(pair, lambda _: server.received_bytes - received >= 1000)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert server.receive(0.01) == []
        assert server.received_bytes - received < 2000
    finally:
        first.close()
        second.close()


def test_nothing_is_lost_while_a_way_opens(keys: JobKeys) -> None:
    """The first tensors go by CURVE and take longer than all that is agreed on meanwhile."""
    with Wire(SERVER, keys) as server, Wire(WORKER, keys, None) as worker:
        worker.connect(SERVER, server.address)
        got: list[Message] = []
        for seq in range(12):
            message = Message(MessageKind.CALL, seq=seq, tensor=torch.full((8 * SIZE,), float(seq)))
            worker.send(SERVER, message)
            got += [m for wire in (server, worker) for _, m in wire.receive(0.005)]
        end = time.monotonic() + 60
        while len(got) < 12:
            assert time.monotonic() < end, f"only {[m.seq for m in got]} of 12 have come"
            got += [m for wire in (server, worker) for _, m in wire.receive(0.005)]
        assert [m.seq for m in got] == list(range(12))
        assert all(m.tensor is not None and m.tensor[-1] == m.seq for m in got)
        gather((server, worker), lambda _: worker.seals(SERVER, tensor(0)))


def test_two_that_connect_to_each_other(keys: JobKeys) -> None:
    with Wire(1, keys) as one, Wire(2, keys) as two:
        one.connect(2, two.address)
        two.connect(1, one.address)
        for seq in range(8):
            one.send(2, tensor(seq))
            two.send(1, tensor(100 + seq))
            one.receive(0.01)
            two.receive(0.01)
        gather((one, two), lambda _: one.seals(2, tensor(0)) and two.seals(1, tensor(0)))
        for seq in range(20, 28):
            one.send(2, tensor(seq))
            two.send(1, tensor(100 + seq))
        got = gather((one, two), has(*range(20, 28), *range(120, 128)), timeout=inbox.PATIENCE / 2)
        assert [m.seq for m in got if 20 <= m.seq < 28] == list(range(20, 28))


def test_what_is_cut_off_holds_nobody_up(pair: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    """The way ends in the middle of a tensor: the other is told, and goes on."""
    server, worker = pair
    agree(server, worker)

    def breaks_off(payload: Part, ticket: bytes) -> Iterator[memoryview]:
        yield from itertools.islice(seal(payload, ticket), 2)
        raise zmq.ZMQError(zmq.EHOSTUNREACH)

    monkeypatch.setattr(bulk, "seal", breaks_off)
    worker.send(SERVER, tensor(1))
    worker.send(SERVER, Message(MessageKind.CALL, seq=2))
    got = gather(pair, has(2), timeout=inbox.PATIENCE / 2)
    assert 1 not in {message.seq for message in got}
