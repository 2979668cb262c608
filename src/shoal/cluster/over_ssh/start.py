"""This end: one ssh for each host, whose output is shown with the host's name, and which all end together.

Nothing is copied but the command: the folder, the script and Python are at the same paths on all hosts. Each ssh keeps
its stdin open; when that closes, however this process ends, the other end has its launcher save and end.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.cluster.local import address_of
from shoal.cluster.output import Relay
from shoal.cluster.over_ssh.hosts import RemoteHost
from shoal.cluster.watch import FINISH_SECONDS, Interrupts, say
from shoal.errors import ConfigError, WorkerFailed

PORT = 29500
GATHER_SECONDS = 15.0
"""After the first host has ended badly the others find out by themselves; so long later they are ended."""
UNREACHED = 255
"""What ssh ends with where it is ssh that has failed."""
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class RemoteJob:
    """What is started on every host."""

    hosts: Sequence[RemoteHost]
    words: Sequence[str]
    """What `shoal run` is given besides the hosts: options, script, the script's arguments."""
    at: str = ""
    folder: str = field(default_factory=os.getcwd)
    ssh: Sequence[str] = ("ssh",)
    """The command; more options of ssh may follow it."""

    def command(self, host: int) -> list[str]:
        """The ssh of one host."""
        at = self.at or f"{self.hosts[0].name}:{PORT}"
        words = ["--hosts", str(len(self.hosts)), "--host", str(host), "--at", at, *self.words]
        remote = [sys.executable, "-m", "shoal.cluster.over_ssh.remote", *words]
        shell = f"cd {shlex.quote(self.folder)} && exec {shlex.join(remote)}"
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return [*self.ssh, *options, *self.hosts[host].words, shell]


def run_over_ssh(job: RemoteJob) -> None:
    """Until all hosts have ended; raises WorkerFailed with the first that has ended badly."""
    if shutil.which(job.ssh[0]) is None:
        raise ConfigError(f"there is no {job.ssh[0]} here; install OpenSSH, or start shoal run on each host.")
    if job.at:
        address_of(job.at)
    with Interrupts() as interrupts:
        crew = _Connections(job, interrupts)
        try:
            crew.watch()
        finally:
            crew.close()


class _Connections:
    """The ssh processes while they run."""

    def __init__(self, job: RemoteJob, interrupts: Interrupts) -> None:
        self._job = job
        self._interrupts = interrupts
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.descriptors[0], selectors.EVENT_READ)
        self._relays: list[Relay] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._bad: tuple[int, int] | None = None
        """The first host that has ended badly, and its exit code."""
        self._ends_at = 0.0
        names = [host.name for host in job.hosts]
        with interrupts.held():
            for number, name in enumerate(names):
                shown = name if names.count(name) == 1 else f"{name}#{number}"
                self._start(number, f"{shown} ")

    def _start(self, number: int, prefix: str) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which then ends all of them in order.
        process = subprocess.Popen(
            self._job.command(number),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._running[number] = process
        for stream, sink in ((process.stdout, 1), (process.stderr, 2)):
            assert stream is not None
            relay = Relay(os.dup(stream.fileno()), sink, prefix)
            stream.close()
            self._relays.append(relay)
            self._selector.register(relay.source, selectors.EVENT_READ, relay)

    def watch(self) -> None:
        """Until all have ended."""
        while self._running:
            self._wait(0.1)
            self._reap()
            if self._interrupts.received:
                self._end_all()
                self._interrupts.obey()
            if self._bad is not None and time.monotonic() > self._ends_at:
                self._end_all()
        if self._bad is not None:
            raise self._failure(*self._bad)

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, Relay):
                self._interrupts.collect()
            elif not key.data.pump():
                self._selector.unregister(key.fileobj)

    def _reap(self) -> None:
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            if process.stdin is not None:
                process.stdin.close()
            if code and self._bad is None:
                self._bad = (number, code)
                self._ends_at = time.monotonic() + GATHER_SECONDS

    def _end_all(self) -> None:
        """Close what the other ends wait for: they save and end. A second Ctrl-C does not wait for that."""
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
        first = len(self._interrupts.received[:1])
        deadline = time.monotonic() + FINISH_SECONDS + 10
        while self._running and len(self._interrupts.received) <= first and time.monotonic() < deadline:
            self._wait(0.1)
            self._reap()
        for process in self._running.values():
            process.kill()

    def _failure(self, number: int, code: int) -> WorkerFailed:
        host = self._job.hosts[number].name
        if code == UNREACHED:
            said = f"ssh has lost host {number} ({host}), or never reached it; see what ssh says above"
            return WorkerFailed(f"{said}, and try: ssh {host} true", 4)
        code = 128 + signal.Signals(-code) if code < 0 else code
        return WorkerFailed(
            f"host {number} ({host}) ended with exit code {code}; its own words are above.", code
        )

    def close(self) -> None:
        """Nothing is left running here, and nothing that was printed is lost."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        for relay in self._relays:
            relay.finish()
        self._selector.close()
        if self._running:
            say(f"{len(self._running)} hosts were left while they ended.")
