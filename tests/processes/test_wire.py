"""Real sockets and real shared memory: who gets through, who does not, and what a lost peer costs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from shoal.errors import ConfigError
from shoal.server.protocol.messages import Message, MessageKind, Where
from shoal.server.transport.frames import encode
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.slabs import Opened, Slab
from shoal.server.transport.sockets import Wire
from shoal.world.shm.memory import SEALS, SharedMemoryUnavailable

SERVER, WORKER = 1, 256
"""The second one's first byte is zero, which zmq keeps for itself."""


def hello(number: int = 0) -> Message:
    return Message(MessageKind.ALIVE, seq=number, meta={"text": "here I am"})


def gather(
    wires: list[Wire], enough: Callable[[list[tuple[int, int, Message]]], bool], timeout: float = 20
) -> list[tuple[int, int, Message]]:
    """Receive on all of these until it is enough: (receiver, sender, message)."""
    got: list[tuple[int, int, Message]] = []
    end = time.monotonic() + timeout
    while not enough(got):
        assert time.monotonic() < end, f"after {timeout} s there are {len(got)} messages"
        for wire in wires:
            got += [(wire.me, sender, message) for sender, message in wire.receive(0.005)]
    return got


def listen_for(seconds: float, *wires: Wire) -> list[tuple[int, int, Message]]:
    """Whatever arrives in that time."""
    end = time.monotonic() + seconds
    return gather(list(wires), lambda _: time.monotonic() > end)


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys.make()


@pytest.fixture
def server(keys: JobKeys) -> Iterator[Wire]:
    with Wire(SERVER, keys) as wire:
        yield wire


def exchange_once(server: Wire, worker: Wire) -> None:
    """One message there, one back."""
    worker.connect(SERVER, server.address)
    assert worker.send(SERVER, hello(5))
    ((_, sender, message),) = gather([server], bool)
    assert (sender, message.seq, message.meta) == (worker.me, 5, {"text": "here I am"})
    assert server.send(worker.me, Message(MessageKind.REPLY, seq=5))
    ((_, sender, message),) = gather([worker], bool)
    assert (sender, message.kind, message.seq) == (SERVER, MessageKind.REPLY, 5)


def test_the_right_keys_open_the_door(server: Wire, keys: JobKeys) -> None:
    assert server.address.startswith("tcp://127.0.0.1:")
    with Wire(WORKER, keys, listen=None) as worker:
        exchange_once(server, worker)
        assert worker.sent_bytes == server.received_bytes - 9  # the name of the sender comes with each


def test_who_has_not_the_keys_stays_outside(server: Wire, keys: JobKeys) -> None:
    other = JobKeys.make()
    public = JobKeys(keys.server_public, other.server_secret, other.client_public, other.client_secret)
    half = dataclasses.replace(keys, client_secret=other.client_secret)
    intruders = [
        Wire(11, other, listen=None),
        Wire(12, public, listen=None),  # knows the key that the server shows
        Wire(13, half, listen=None),  # knows the client's public key too
        Wire(14, None, listen=None),  # speaks without any
    ]
    try:
        for intruder in intruders:
            intruder.connect(SERVER, server.address)
            intruder.send(SERVER, hello())
        assert listen_for(1.5, server, *intruders) == []
        for intruder in intruders:
            assert not server.send(intruder.me, hello()), f"{intruder.me} has been let in"
        assert listen_for(0.3, server, *intruders) == []
        with Wire(WORKER, keys, listen=None) as worker:
            exchange_once(server, worker)
        assert listen_for(0.3, server, *intruders) == []
        assert server.refused == 0
        assert server.received_bytes < 200, "nothing but the worker's message has come in"
    finally:
        for intruder in intruders:
            intruder.close()


def test_a_false_server_learns_nothing(keys: JobKeys) -> None:
    with Wire(SERVER, JobKeys.make()) as false, Wire(SERVER, None) as open_, Wire(WORKER, keys) as worker:
        for number, wire in enumerate([false, open_]):
            worker.connect(number, wire.address)
            worker.send(number, hello())
        assert listen_for(1.0, false, open_, worker) == []
        assert false.received_bytes == open_.received_bytes == 0


def test_traffic_is_encrypted(keys: JobKeys) -> None:
    """A tap between the two sees neither text nor numbers."""
    seen = bytearray()
    with (
        Wire(SERVER, keys) as server,
        Wire(WORKER, keys, listen=None) as worker,
        tap(server, seen) as address,
    ):
        worker.connect(SERVER, address)
        payload = torch.full((1000,), 7, dtype=torch.uint8)
        worker.send(SERVER, Message(MessageKind.CALL, meta={"secret": "swordfish"}, tensor=payload))
        gather([server], bool)
    assert len(seen) > 1000
    assert b"CURVE" in seen
    assert b"swordfish" not in seen
    assert b"\7" * 50 not in seen


@contextlib.contextmanager
def tap(server: Wire, seen: bytearray) -> Iterator[str]:
    """Passes one connection on to `server`, both ways, and keeps what it sees."""
    front = socket.create_server(("127.0.0.1", 0))
    back = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
    ends: list[socket.socket] = [front, back]

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            near, _ = front.accept()
            ends.append(near)
            threading.Thread(target=copy, args=(back, near), daemon=True).start()
            copy(near, back)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{front.getsockname()[1]}"
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("secret", [True, False])
def test_64_megabytes_each_way(secret: bool) -> None:
    keys = JobKeys.make() if secret else None
    generator = torch.Generator().manual_seed(1)
    there = torch.randn(16 << 20, generator=generator)
    back = there.flip(0)
    with Wire(1, keys) as one, Wire(2, keys) as two:
        one.connect(2, two.address)
        two.connect(1, one.address)
        assert one.send(2, Message(MessageKind.CALL, tensor=there))
        assert two.send(1, Message(MessageKind.CALL, tensor=back))
        got = {receiver: (sender, message) for receiver, sender, message in gather([one, two], both, 60)}
        assert got[1][0] == 2
        assert got[2][0] == 1
        assert torch.equal(got[2][1].tensor, there)  # type: ignore[arg-type]
        assert torch.equal(got[1][1].tensor, back)  # type: ignore[arg-type]
        assert one.sent_bytes > there.nbytes


def both(got: list[tuple[int, int, Message]]) -> bool:
    return len(got) == 2


def test_order_is_kept_and_nobody_is_starved() -> None:
    with Wire(SERVER, None) as server, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Wire(10 + n, None, listen=None)) for n in range(4)]
        for worker in workers:
            worker.connect(SERVER, server.address)
            for number in range(500):
                assert worker.send(SERVER, hello(number))
        got = gather([server], lambda got: len(got) == 2000)
    for worker in workers:
        assert [m.seq for _, sender, m in got if sender == worker.me] == list(range(500))


@pytest.mark.parametrize("address", ["inproc://shoal-test", "ipc://{folder}/socket", "tcp://[::1]:*"])
def test_other_ways_within_a_host(address: str, tmp_path: Path) -> None:
    if "[::1]" in address and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with Wire(SERVER, None, address.format(folder=tmp_path)) as server, Wire(WORKER, None, None) as worker:
        exchange_once(server, worker)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://10.1.2.3:5", "tcp://[::]:*", "tcp://eth0:*"]
)
def test_nothing_leaves_the_host_without_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="takes the job's keys"):
        Wire(SERVER, None, address)
    with Wire(SERVER, None) as wire, pytest.raises(ConfigError, match="takes the job's keys"):
        wire.connect(2, address)


def test_other_hosts_get_in_where_that_is_asked_for(keys: JobKeys) -> None:
    with Wire(SERVER, keys, "tcp://0.0.0.0:*") as server, Wire(WORKER, keys, None) as worker:
        port = server.address.rpartition(":")[2]
        worker.connect(SERVER, f"tcp://127.0.0.1:{port}")
        worker.send(SERVER, hello())
        assert len(gather([server], bool)) == 1


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "udp://127.0.0.1:5", "tcp://127.0.0.1:0;10.0.0.1:5", "ipc://"]
)
def test_what_is_no_address_is_refused(address: str, keys: JobKeys) -> None:
    for some in (None, keys):
        with pytest.raises(ConfigError, match="not an address"):
            Wire(SERVER, some, address)


def test_a_port_that_is_taken_is_named(server: Wire, keys: JobKeys) -> None:
    with pytest.raises(ConfigError, match=f"'{server.address}': Address already in use"):
        Wire(2, keys, server.address)
    with pytest.raises(ConfigError, match="inside of one process"):
        Wire(2, keys, "inproc://here")


def test_nobody_waits_for_a_peer_that_is_not_there(keys: JobKeys) -> None:
    with Wire(SERVER, keys) as server, Wire(WORKER, keys, None) as worker:
        begin = time.monotonic()
        assert not server.send(99, hello())  # never heard of
        assert not worker.send(99, hello())  # does not even listen
        worker.connect(7, "tcp://127.0.0.1:1")  # nobody there
        taken = [worker.send(7, hello(number)) for number in range(3000)]
        assert taken[0]
        assert not taken[-1]
        assert worker.unsent == 1 + taken.count(False)
        assert worker.receive(0) == []
        assert time.monotonic() - begin < 5
        worker.disconnect(7)
        assert not worker.send(7, hello())


def test_a_peer_that_goes_costs_nothing_and_may_come_back(server: Wire, keys: JobKeys) -> None:
    with Wire(WORKER, keys, None) as worker:
        exchange_once(server, worker)
    end = time.monotonic() + 10
    while server.send(WORKER, hello()):
        assert time.monotonic() < end, "the server never noticed"
        server.receive(0.01)
    with Wire(WORKER, keys, None) as again:
        exchange_once(server, again)


def test_messages_wait_for_a_peer_that_starts_later(keys: JobKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    with Wire(WORKER, keys, None) as worker:
        worker.connect(SERVER, address)
        assert worker.send(SERVER, hello(3))
        time.sleep(0.3)
        with Wire(SERVER, keys, address) as server:
            assert gather([server], bool)[0][2].seq == 3


def test_the_last_word_is_heard_if_one_lingers(server: Wire, keys: JobKeys) -> None:
    worker = Wire(WORKER, keys, None)
    exchange_once(server, worker)
    worker.send(
        SERVER, Message(MessageKind.BYE, tensor=torch.zeros(16 << 20))
    )  # too large to have left already
    worker.close(linger=20)
    assert gather([server], bool)[0][2].kind == MessageKind.BYE


def test_a_killed_process_is_survived(keys: JobKeys, tmp_path: Path) -> None:
    """The other process dies in the middle of a large message."""
    keys.write(tmp_path / "keys")
    code = (
        "import sys; from pathlib import Path; import torch\n"
        "from shoal.server.transport.keys import JobKeys; from shoal.server.transport.sockets import Wire\n"
        "from shoal.server.protocol.messages import Message, MessageKind\n"
        "wire = Wire(2, JobKeys.read(Path(sys.argv[1])), None); wire.connect(1, sys.argv[2])\n"
        "wire.send(1, Message(MessageKind.ALIVE)); wire.receive(60)\n"
        "wire.send(1, Message(MessageKind.CALL, tensor=torch.zeros(1 << 27))); wire.receive(60)\n"
    )
    with Wire(SERVER, keys) as server:
        command = [sys.executable, "-c", code, str(tmp_path / "keys"), server.address]
        with subprocess.Popen(command) as child:
            gather([server], bool, 60)
            assert server.send(2, hello())
            assert child.poll() is None
            time.sleep(0.5)
            child.kill()
        assert child.returncode == -signal.SIGKILL
        arrived = [m for _, _, m in listen_for(0.5, server) if m.tensor is not None]
        assert all(m.tensor is not None and m.tensor.numel() == 1 << 27 for m in arrived), "half a message"
        assert server.refused == 0
        with Wire(WORKER, keys, None) as worker:
            exchange_once(server, worker)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""How a peer that speaks zmq begins: a signature, then its version."""


def garbage() -> Iterator[bytes]:
    chance = random.Random(5)
    yield from (b"", b"\0", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\xff" * 100_000, bytes(100_000))
    yield b"\x01\x00" + b"\x06\x00hello" * 100  # version 1 of the protocol, which knows no security
    for mechanism in (b"NULL", b"PLAIN", b"CURVE", b"????"):
        yield GREETING + mechanism.ljust(20, b"\0") + bytes(32)
        yield GREETING + mechanism.ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8 + b"x" * 1000
        yield (
            GREETING + mechanism.ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY" + b"\0" * 32 + b"\0\2hi"
        )
        for _ in range(10):
            yield GREETING + mechanism.ljust(20, b"\0") + bytes(32) + chance.randbytes(500)
    for _ in range(50):
        yield chance.randbytes(chance.randrange(2000))


@pytest.mark.parametrize("secret", [True, False])
def test_garbage_on_the_port_does_no_harm(secret: bool) -> None:
    keys = JobKeys.make() if secret else None
    before = psutil.Process().memory_info().rss
    with Wire(SERVER, keys) as server, Wire(WORKER, keys, None) as worker, contextlib.ExitStack() as stack:
        port = int(server.address.rpartition(":")[2])
        for data in garbage():
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):  # it may have hung up already
                line.sendall(data)
            assert server.receive(0) == []
        exchange_once(server, worker)
        assert listen_for(0.3, server) == []
    assert psutil.Process().memory_info().rss - before < 200e6


def test_a_holder_of_the_keys_that_talks_nonsense_is_ignored(server: Wire, keys: JobKeys) -> None:
    context = zmq.Context()
    for name in (b"n" + (77).to_bytes(8, "little"), b"", b"long" * 20):
        line = context.socket(zmq.DEALER)
        line.linger = 5000
        if name:
            line.routing_id = name
        line.curve_serverkey, line.curve_publickey = keys.server_public, keys.client_public
        line.curve_secretkey = keys.client_secret
        line.connect(server.address)
        real = encode(hello())
        for parts in ([b""], [b"x"] * 50, [b"x" * 84, b"y", b"z"], [real[0], b""], [real[1], real[0]]):
            line.send_multipart(parts)
        line.send_multipart(real)
        line.close()
    end = time.monotonic() + 20
    got = []
    while server.refused < 17:
        assert time.monotonic() < end
        got += server.receive(0.01)
    context.term()
    assert [sender for sender, _ in got] == [77], "the one that has a number and sent a message"
    with Wire(WORKER, keys, None) as worker:
        exchange_once(server, worker)
    assert server.refused == 17


def test_a_tensor_that_changes_on_its_way_is_dropped() -> None:
    """Without keys and in one process, the receiver looks at the sender's memory itself."""
    with Wire(SERVER, None, "inproc://changes") as server, Wire(WORKER, None, None) as worker:
        worker.connect(SERVER, server.address)
        tensor = torch.zeros(100_000)
        worker.send(SERVER, Message(MessageKind.CALL, tensor=tensor))
        tensor[5] = 1
        worker.send(SERVER, Message(MessageKind.CALL, tensor=tensor))
        ((_, _, message),) = gather([server], bool)
        assert server.refused == 1
        assert message.tensor is not None
        assert message.tensor[5] == 1


def test_another_thread_can_wake_it(server: Wire) -> None:
    begin = time.monotonic()
    threading.Timer(0.2, server.wake).start()
    assert server.receive(30) == []
    assert 0.1 < time.monotonic() - begin < 5
    begin = time.monotonic()
    assert server.receive(0.2) == []  # once woken, it sleeps again
    assert time.monotonic() - begin >= 0.19
    for _ in range(100_000):
        server.wake()
    assert server.receive(30) == []


def test_what_is_closed_stays_closed(keys: JobKeys) -> None:
    files = psutil.Process().num_fds()
    for _ in range(20):
        wire = Wire(SERVER, keys)
        wire.connect(5, "tcp://127.0.0.1:1")
        wire.close()
        wire.close()
        wire.wake()
        assert not wire.send(5, hello())
        with pytest.raises(ValueError, match="closed"):
            wire.receive(0)
        with pytest.raises(ValueError, match="closed"):
            wire.connect(5, "tcp://127.0.0.1:1")
    assert psutil.Process().num_fds() <= files + 5


# Shared memory.


def test_a_slab_is_seen_by_who_is_told_where() -> None:
    slab, opened = Slab(5000), Opened()
    assert slab.nbytes == 8192
    mine = slab.tensor(torch.float32, 4096, 10)
    mine.copy_(torch.arange(10))
    theirs = opened.tensor(slab.where(torch.float32, 4096, 10))
    assert theirs is not None
    assert theirs.data_ptr() != mine.data_ptr()
    theirs[3] = 100
    assert mine[3] == 100
    slab.words(0, 2)[1] = 2**64 - 1
    assert opened.tensor(slab.where(torch.int64, 8, 1)).item() == -1  # type: ignore[union-attr]
    assert opened.tensor(slab.where(torch.float32, 8192, 0)).numel() == 0  # type: ignore[union-attr]
    assert len(opened) == 1
    for wrong in [(0, 2049), (8192, 1), (-4, 1), (4, -1), (2, 1), (0, 2**62), (2**63, 1)]:
        with pytest.raises(ValueError, match="no tensor here"):
            slab.where(torch.float32, *wrong)
        path = slab.where(torch.float32, 0, 0).path
        assert opened.tensor(Where(path, *wrong, torch.float32)) is None
    opened.close()
    slab.close()
    assert (mine[3], theirs[3]) == (100, 100)  # who holds a tensor holds its memory


def test_a_path_that_is_used_again_shows_the_new_memory() -> None:
    opened, first = Opened(), Slab(4096)
    first.tensor(torch.int64, 0, 1)[0] = 1
    old = first.where(torch.int64, 0, 1)
    kept = opened.tensor(old)
    first.close()
    assert opened.tensor(old) is None
    assert len(opened) == 0
    between = Slab(4096)
    assert opened.tensor(between.where(torch.int64, 0, 1)) is not None
    between.close()  # and nobody looks before the next one has its number
    second = Slab(8192)
    second.tensor(torch.int64, 0, 1)[0] = 2
    assert second.where(torch.int64, 0, 1) == old, "the system gave the same number again"
    assert opened.tensor(old).item() == 2  # type: ignore[union-attr]
    assert kept is not None
    assert kept.item() == 1
    with pytest.raises(ValueError, match="no tensor here"):
        first.where(torch.int64, 0, 1)


def test_only_slabs_are_opened(tmp_path: Path) -> None:
    opened = Opened()
    (tmp_path / "file").write_bytes(bytes(8192))
    memory = [
        os.open(tmp_path / "file", os.O_RDWR),
        os.memfd_create("other", os.MFD_ALLOW_SEALING),
        os.memfd_create(
            "shoal-unsealed", os.MFD_ALLOW_SEALING
        ),  # its owner could cut it short under our eyes
    ]
    try:
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in memory]
        for fd in memory:
            os.ftruncate(fd, 8192)
        fcntl.fcntl(memory[1], fcntl.F_ADD_SEALS, SEALS)  # it lacks nothing but our name
        paths += [
            str(tmp_path / "file"),
            "/proc/self/fd/0",
            "/proc/999999999/fd/0",
            "",
            "\0",
            "/proc/1/fd/999",
        ]
        for path in paths:
            assert opened.tensor(Where(path, 0, 1, torch.float32)) is None, path
    finally:
        for fd in memory:
            os.close(fd)
    slab = Slab(4096)
    with pytest.raises(OSError, match=r"Operation not permitted"):
        os.truncate(slab.where(torch.uint8, 0, 0).path, 0)


def test_no_memory_is_said() -> None:
    """With a limit to the size of files, so that a check that is missing cannot take all the memory of this host."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for size in (1 << 50, 1 << 60, 1 << 70):
            with pytest.raises(SharedMemoryUnavailable, match=r"MB are wanted and .* are free"):
                Slab(size)
        with pytest.raises(SharedMemoryUnavailable, match="File too large"):
            Slab(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_slabs_of_a_process_that_ended_are_let_go() -> None:
    code = (
        "import torch; from shoal.server.transport.slabs import Slab\n"
        "slab = Slab(64 << 20); numbers = slab.tensor(torch.float32, 4096, 100); numbers.fill_(3)\n"
        "where = slab.where(torch.float32, 4096, 100)\n"
        "print(where.path, flush=True); input(); print(numbers[7].item(), flush=True); input()\n"
    )
    opened = Opened()
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        where = Where(child.stdout.readline().strip(), 4096, 100, torch.float32)
        theirs = opened.tensor(where)
        assert theirs is not None
        assert theirs.tolist() == [3.0] * 100
        theirs[7] = 8
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == "8.0"
        child.kill()
        child.wait()
    assert theirs[7] == 8  # no harm comes from memory whose owner is dead
    del theirs
    assert mapped() == 1
    mine = Slab(4096)
    assert (
        opened.tensor(mine.where(torch.uint8, 0, 1)) is not None
    )  # a new one drives out those that are gone
    assert len(opened) == 1
    assert mapped() == 0
    assert opened.tensor(where) is None


def mapped() -> int:
    """Mappings of 64 MB of such memory in this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:shoal" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(stop, 16) - int(start, 16) == 64 << 20 for start, stop in spans)


def test_only_so_many_are_kept() -> None:
    opened, slabs = Opened(most=3), [Slab(4096) for _ in range(6)]
    for number, slab in enumerate(slabs):
        slab.tensor(torch.int64, 0, 1)[0] = number
    for _ in range(2):
        for number, slab in enumerate(slabs):
            assert opened.tensor(slab.where(torch.int64, 0, 1)).item() == number  # type: ignore[union-attr]
            assert len(opened) <= 3
