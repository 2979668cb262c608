"""A coordinator and servers as real processes, for the benchmarks of the parameter server."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shoal.server.processes import coordinate, serve
from shoal.server.transport.auth import LOOPBACK
from shoal.server.transport.keys import JobKeys
from shoal.testing.hosts import Hosts

_CONTEXT = multiprocessing.get_context("forkserver")
WORKER, SERVERS = 0, 1
"""Who is where, of two hosts."""


class Servers:
    """The servers of one job. The job's keys are in a file, as those of servers that stand alone."""

    def __init__(self, servers: int = 2, encrypted: bool = True, hosts: Hosts | None = None) -> None:
        """`hosts`: the servers are on the second, and the worker has to enter the first."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
        self.keys = JobKeys.make() if encrypted else None
        self.file = Path(self._folder.name) / "keys"
        if self.keys is not None:
            self.keys.write(self.file)
        self._processes: list[BaseProcess] = []
        hears, says = _CONTEXT.Pipe(duplex=False)
        self._start(_coordinate, self.keys, says, hosts)
        self.address: str = hears.recv()
        for slot in range(servers):
            self._start(_serve, self.address, self.keys, slot, hosts)

    @property
    def options(self) -> str:
        """What to write into the brackets of `ps(...)` to find them."""
        return f"at={self.address.removeprefix('tcp://')}, keys={self.file}"

    @property
    def pids(self) -> list[int]:
        """The coordinator, then the servers: for a profiler."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        process = _CONTEXT.Process(target=run, args=args, daemon=True)
        process.start()
        self._processes.append(process)


def _coordinate(keys: JobKeys | None, says: Connection, hosts: Hosts | None) -> None:
    coordinate(keys, _move(hosts), ready=lambda address, _: says.send(address))


def _serve(address: str, keys: JobKeys | None, slot: int, hosts: Hosts | None) -> None:
    torch.set_num_threads(1)
    serve(address, keys, _move(hosts), slot=slot)


def _move(hosts: Hosts | None) -> str:
    """Go where servers belong; returns where to listen there."""
    if hosts is None:
        return LOOPBACK
    hosts.enter(SERVERS)
    return f"tcp://{hosts.addresses[SERVERS]}:*"
