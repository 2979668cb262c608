"""A coordinator and servers as real processes, for the benchmarks of the parameter server."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import torch

from shoal.server.host import coordinate, serve
from shoal.server.keys import JobKeys
from shoal.server.post import new_id
from shoal.server.wire import LOOPBACK

_CONTEXT = multiprocessing.get_context("forkserver")
_NEW_NET = 0x40000000
"""CLONE_NEWNET of <sched.h>."""


@dataclass(frozen=True)
class Cable:
    """Another host on this machine: a network namespace at the far end of a cable of some rate. Needs root."""

    rate: str
    name: str = f"shoal-far-{os.getpid()}"

    def __enter__(self) -> Cable:
        near, far = f"shn{os.getpid()}", f"shf{os.getpid()}"
        bucket = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
        inside = ["ip", "netns", "exec", self.name]
        for command in (
            ["ip", "netns", "add", self.name],
            ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name],
            ["ip", "addr", "add", "10.79.0.1/24", "dev", near],
            ["ip", "link", "set", near, "up"],
            [*inside, "ip", "addr", "add", "10.79.0.2/24", "dev", far],
            [*inside, "ip", "link", "set", far, "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
            ["tc", "qdisc", "add", "dev", near, *bucket],
            [*inside, "tc", "qdisc", "add", "dev", far, *bucket],
        ):
            subprocess.run(command, check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False)

    def enter(self) -> str:
        """Move this process to the far end; returns where to listen there."""
        with open(f"/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        return "tcp://10.79.0.2:*"


class Attended:
    """The servers of one job. The job's keys are in a file, as those of servers that stand alone."""

    def __init__(self, servers: int = 2, encrypted: bool = True, cable: Cable | None = None) -> None:
        """`cable`: the servers are at its far end."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-")
        self.keys = JobKeys.make() if encrypted else None
        self.file = Path(self._folder.name) / "keys"
        if self.keys is not None:
            self.keys.write(self.file)
        self._processes: list[BaseProcess] = []
        hears, says = _CONTEXT.Pipe(duplex=False)
        self._start(_coordinate, self.keys, says, cable)
        self.address: str = hears.recv()
        for slot in range(servers):
            self._start(_serve, self.address, self.keys, slot, cable)

    @property
    def options(self) -> str:
        """What to write into the brackets of `ps(...)` to find them."""
        return f"at={self.address.removeprefix('tcp://')}, keys={self.file}"

    @property
    def pids(self) -> list[int]:
        """The coordinator, then the servers: for a profiler."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Attended:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, run, *args) -> None:  # type: ignore[no-untyped-def]
        process = _CONTEXT.Process(target=run, args=args, daemon=True)
        process.start()
        self._processes.append(process)


def _coordinate(keys: JobKeys | None, says, cable: Cable | None) -> None:  # type: ignore[no-untyped-def]
    listen = LOOPBACK if cable is None else cable.enter()
    coordinate(keys, listen, ready=lambda address, _: says.send(address))


def _serve(address: str, keys: JobKeys | None, slot: int, cable: Cable | None) -> None:
    torch.set_num_threads(1)
    if cable is None:
        serve(address, keys, slot=slot)
    else:
        serve(address, keys, cable.enter(), slot=slot, me=new_id("the far end"))
