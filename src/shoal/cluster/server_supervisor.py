"""Coordinator and servers as child processes: started, and replaced when one ends.

The parent sees the end of a child at once and reports it to the coordinator, which need not wait for a timeout. A new
server takes the place of one that ended and gets its shards from the copies; a new coordinator gets its state from the
servers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from shoal.cluster.worker import AGAIN_SECONDS, AGAIN_TIMES, die_with, leave_parent
from shoal.errors import ConfigError
from shoal.server.processes import coordinate, serve
from shoal.server.transport.auth import LOOPBACK
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import new_id

_PR_SET_NAME = 15
_GONE = 256
"""How many of the latest ends are reported to a new coordinator."""

Watch = Callable[[int, Callable[[], None]], None]


class ServerSupervisor:
    """Starts and replaces them. `watch(descriptor, action)` registers with the selector, `forget` undoes it."""

    def __init__(
        self,
        threads: str,
        keys: JobKeys,
        watch: Watch,
        forget: Callable[[int], None],
        generation: int = 0,
    ) -> None:
        """`generation`: not below that of any coordinator that servers still listen to."""
        self._threads = threads
        self._keys = keys
        self._watch = watch
        self._forget = forget
        self.address = ""
        """The address of the coordinator."""
        self.closing: Callable[[], list[int]] = list
        """Descriptors that a forked child inherits and must close."""
        self._generation = generation
        self._pids: dict[int, tuple[str, int, int]] = {}
        """By process: where it listens, its slot, and its number in the job (0 for the coordinator)."""
        self._watched: dict[int, int] = {}
        """By process: the descriptor that becomes readable at its end."""
        self._to_coordinator = -1
        self._gone: list[int] = []
        """The numbers of those that have ended, for a coordinator that is started later."""
        self._ends: list[float] = []
        self._ended = False

    @property
    def descriptors(self) -> list[int]:
        """What a forked worker inherits and must close."""
        return [self._to_coordinator] if self._to_coordinator >= 0 else []

    def coordinate(self, listen: str = LOOPBACK) -> None:
        """Start the coordinator."""
        self._generation += 1
        generation = self._generation
        reads, writes = os.pipe2(os.O_CLOEXEC)
        hears, tells = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(hears, False)

        def ready(address: str, _: object) -> None:
            os.write(writes, address.encode())
            os.close(writes)

        def run() -> None:
            os.close(reads)
            os.close(tells)
            coordinate(self._keys, listen, generation, ready=ready, gone=lambda: _numbers(hears))

        self._fork(listen, -1, 0, run)
        os.close(writes)
        os.close(hears)
        if self._to_coordinator >= 0:
            os.close(self._to_coordinator)
        self._to_coordinator = tells
        for who in self._gone:
            os.write(tells, who.to_bytes(8, "little"))
        found = os.read(reads, 4096).decode()
        os.close(reads)
        if not found and not self.address:
            raise ConfigError(f"the coordinator cannot listen at {listen}; its own message says why.")
        self.address = found or self.address

    def serve(self, slot: int, listen: str = LOOPBACK) -> None:
        """Start a server; `slot` is its number among the servers."""
        me = new_id()
        keys = self._keys
        address = self.address
        self._fork(listen, slot, me, lambda: serve(address, keys, listen, slot=slot, me=me))

    def report_end(self, who: int) -> None:
        """Report the end of a server or worker to the coordinator, and to each that replaces it."""
        self._gone = [*self._gone[1 - _GONE :], who]
        if self._to_coordinator >= 0:
            try:
                os.write(self._to_coordinator, who.to_bytes(8, "little"))
            except OSError:
                return  # it has ended too; its successor gets the list

    def close(self) -> None:
        """End them all."""
        self._ended = True
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # they keep nothing that outlives the job
        for pid in self._pids:
            os.waitpid(pid, 0)
            self._unwatch(pid)
        self._pids.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._to_coordinator = -1

    def _fork(self, listen: str, slot: int, me: int, run: Callable[[], None]) -> None:
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to pass on
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                die_with(parent)
                for descriptor in self.closing():
                    os.close(descriptor)
                leave_parent(self._threads)
                _name("shoal-server" if me else "shoal-coord")
                run()
            except BaseException as error:
                print(f"shoal: a server ended: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)  # never back into the parent's code
        self._pids[pid] = (listen, slot, me)
        self._watched[pid] = os.pidfd_open(pid)
        self._watch(self._watched[pid], lambda: self._reap(pid))

    def _unwatch(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        self._forget(descriptor)
        os.close(descriptor)

    def _reap(self, pid: int) -> None:
        if pid not in self._pids:
            return  # `close` has collected it
        self._unwatch(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        listen, slot, me = self._pids.pop(pid)
        now = time.monotonic()
        own = [] if code == -signal.SIGKILL else [now]  # a killed process has not failed by itself
        self._ends = [at for at in self._ends if now - at < AGAIN_SECONDS] + own
        if self._ended:
            return
        if len(self._ends) > AGAIN_TIMES:
            print("shoal: servers keep failing, and are not started again.", file=sys.stderr, flush=True)
            return
        if not me:
            self.coordinate(self.address or listen)
        else:
            self.report_end(me)
            self.serve(slot, listen)


def _name(text: str) -> None:
    """What `ps` and `top` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text.encode(), 0, 0, 0)


def _numbers(descriptor: int) -> list[int]:
    """The numbers that the parent has written into the pipe since the last call."""
    try:
        data = os.read(descriptor, 4096)
    except BlockingIOError:
        return []
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
