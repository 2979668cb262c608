"""Coordinator and servers of a job, as children of the launcher: started when a worker asks for them, and again when
one ends.

Workers ask through a socket in the job's private folder. The launcher sees the end of a child at once and tells the
coordinator, so nobody waits for a silence to be long enough. A new server takes the place of one that ended and gets
its shards from the copies; a new coordinator learns everything from the servers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from shoal.cluster.worker import die_with, leave_parent
from shoal.server.host import coordinate, serve
from shoal.server.keys import JobKeys
from shoal.server.post import new_id
from shoal.server.wire import LOOPBACK

SOCKET = "launcher.sock"
_QUICK = 5
"""So many ends in a row, each soon after its start, are no accident any more."""

Watch = Callable[[int, Callable[[], None]], None]


class Attendants:
    """The children that serve the workers. `watch(descriptor, action)` has the launcher's selector call back."""

    def __init__(self, folder: str, threads: str, watch: Watch, forget: Callable[[int], None]) -> None:
        self._threads, self._watch, self._forget = threads, watch, forget
        self.path = str(Path(folder) / SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        watch(self._listener.fileno(), self._accept)
        self._keys: JobKeys | None = None
        self._address = ""
        self._generation = 0
        self._pids: dict[int, tuple[str, int, int]] = {}
        """Process -> what it is, its slot, its number in the job."""
        self._to_coordinator = -1
        self._workers: dict[int, int] = {}
        """Rank -> the number of its worker in the job."""
        self._closing = False
        self._ends = 0

    @property
    def started(self) -> bool:
        """Whether workers have asked for servers: then they can be replaced."""
        return self._keys is not None

    @property
    def descriptors(self) -> list[int]:
        """What a forked child inherits and must close."""
        return [self._listener.fileno(), *([self._to_coordinator] if self._to_coordinator >= 0 else [])]

    def worker_ended(self, rank: int) -> None:
        """A worker is gone: what it was working on can go to others now."""
        if rank in self._workers:
            self._tell(self._workers.pop(rank))

    def close(self) -> None:
        """End them all."""
        self._closing = True
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # they keep nothing that outlives the job
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._listener.close()
        if self._to_coordinator >= 0:
            os.close(self._to_coordinator)

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        with line:
            line.settimeout(5.0)
            try:
                asked = json.loads(line.makefile("rb").readline(65536))
                servers, rank, me = int(asked["servers"]), int(asked["rank"]), int(asked["id"])
            except (OSError, ValueError, KeyError, TypeError):
                return  # it ended before it had said what it wants
            if not self.started:
                self._keys = JobKeys.make()
                self._start_coordinator()
                for slot in range(servers):
                    self._start_server(slot)
            self._workers[rank] = me
            assert self._keys is not None
            answer = {"address": self._address, "keys": self._keys.to_text()}
            try:
                line.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                return

    def _start_coordinator(self) -> None:
        self._generation += 1
        generation, listen = self._generation, self._address or LOOPBACK
        reads, writes = os.pipe2(os.O_CLOEXEC)
        hears, tells = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(hears, False)

        def ready(address: str, _: object) -> None:
            os.write(writes, address.encode())
            os.close(writes)

        def run() -> None:
            os.close(reads)
            os.close(tells)
            coordinate(
                self._keys,
                listen,
                generation,
                ready=ready,
                gone=lambda: _numbers(hears),
            )

        self._fork("coordinator", -1, 0, run)
        os.close(writes)
        os.close(hears)
        if self._to_coordinator >= 0:
            os.close(self._to_coordinator)
        self._to_coordinator = tells
        self._address = os.read(reads, 4096).decode() or self._address
        os.close(reads)

    def _start_server(self, slot: int) -> None:
        me = new_id()
        keys, address = self._keys, self._address
        self._fork("server", slot, me, lambda: serve(address, keys, slot=slot, me=me))

    def _fork(self, what: str, slot: int, me: int, run: Callable[[], None]) -> None:
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher to pass on
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                die_with(launcher)
                leave_parent(self._threads)
                run()
            finally:
                os._exit(1)  # never back into the launcher's code
        self._pids[pid] = (what, slot, me)
        descriptor = os.pidfd_open(pid)
        self._watch(descriptor, lambda: self._reap(pid, descriptor))

    def _reap(self, pid: int, descriptor: int) -> None:
        self._forget(descriptor)
        os.close(descriptor)
        os.waitpid(pid, 0)
        what, slot, me = self._pids.pop(pid)
        self._ends += 1
        if self._closing:
            return
        if what == "coordinator":
            self._start_coordinator()
        else:
            self._tell(me)
            self._start_server(slot)

    def _tell(self, who: int) -> None:
        """Let the coordinator know that somebody has ended."""
        try:
            os.write(self._to_coordinator, who.to_bytes(8, "little"))
        except OSError:
            return  # it has ended too, and its successor will miss them soon enough


def _numbers(descriptor: int) -> list[int]:
    """What has come through the launcher's pipe."""
    try:
        data = os.read(descriptor, 4096)
    except BlockingIOError:
        return []
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
