"""A worker that does not reach its servers: three reasons, three sentences, each after seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from shoal.errors import ServersLost
from shoal.server.client import connection
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.processes import Threads
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import new_id

LIMIT = 10.0


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.STAND_SECONDS + connection.PROBE_SECONDS < LIMIT - 2
    monkeypatch.setattr(connection, "STAND_SECONDS", 1.5)


@pytest.fixture(scope="module")
def keys() -> JobKeys:
    return JobKeys.make()


@pytest.fixture(scope="module")
def servers(keys: JobKeys) -> Iterator[Threads]:
    made = Threads(1, keys)
    yield made
    made.close()


def join(address: str, keys: JobKeys, servers: int = 1) -> str:
    """What a worker of a job that wants so many servers is told; empty if it can join."""
    began = time.monotonic()
    link = Link(new_id(), address, keys, 0, [[4096], ["ledger"], servers, 1, 60.0], standing=True)
    try:
        link.run(WorkerProtocol(link.client, 0, []).join())
    except ServersLost as lost:
        assert connection.STAND_SECONDS <= time.monotonic() - began < LIMIT
        return str(lost)
    finally:
        link.close()
    return ""


def test_wrong_keys(servers: Threads) -> None:
    assert "does not take these keys" in join(servers.address, JobKeys.make())


def test_nobody_listens(keys: JobKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = join(f"tcp://127.0.0.1:{port}", keys)
    assert said.startswith(f"nobody listens at 127.0.0.1:{port} after ")


def test_too_few_servers_and_then_enough(servers: Threads, keys: JobKeys) -> None:
    said = join(servers.address, keys, servers=3)
    assert "has 1, and servers=3 are wanted" in said
    assert join(servers.address, keys) == "", "what a job that gave up wanted is forgotten"
