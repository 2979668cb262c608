"""The two processes on the two hosts, and how they are told what to do."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from benchmarks.workload.children import environment, python
from shoal.errors import ShoalError
from shoal.testing.hosts import INTERFACE, Hosts

PORT = 29517
STARTING = 120.0
"""Seconds that two processes may take to import torch and meet."""
GRACE = 5.0
"""Seconds that a host has left to answer when the other has failed."""


class HostFailed(ShoalError):
    """A host could not do what it was told; nothing more can be asked of the two."""


class Pair:
    """Two hosts that take commands together."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], logs: list[IO[bytes]]) -> None:
        self._processes, self._logs = processes, logs
        self._selector = selectors.DefaultSelector()
        self._unread = [b"" for _ in processes]
        for number, process in enumerate(processes):
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, number)

    def ask(self, seconds: float, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Give both the same command; their answers within so many seconds, host 0's first."""
        line = json.dumps(command).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise HostFailed(self._last_words()) from None
        return self.answers(seconds, f"{command['do']} {command.get('name', '')}".strip())

    def answers(self, seconds: float, what: str) -> list[dict[str, Any]]:
        """One answer of each, within so many seconds."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(self._processes):
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                failures = [reply["error"] for reply in found.values() if "error" in reply]
                raise HostFailed(failures[0] if failures else f"no answer to '{what}' in {seconds:.0f} s")
            for key, _ in ready:
                reply = self._read(key.data)
                if reply is not None:
                    found[key.data] = reply
                    if "error" in reply:  # the other may be waiting for this one, and would for long
                        deadline = min(deadline, time.monotonic() + GRACE)
        failures = [reply["error"] for reply in found.values() if "error" in reply]
        if failures:
            # A connection that breaks is what the other host sees of the first one's failure.
            raise HostFailed(min(failures, key=lambda text: "Connection" in text or "PeerLost" in text))
        return [found[number] for number in range(len(self._processes))]

    def _read(self, number: int) -> dict[str, Any] | None:
        stream = self._processes[number].stdout
        assert stream is not None
        got = os.read(stream.fileno(), 1 << 16)
        if not got:
            raise HostFailed(self._last_words())
        line, end, rest = (self._unread[number] + got).partition(b"\n")
        self._unread[number] = rest if end else line
        reply: dict[str, Any] | None = json.loads(line) if end else None
        return reply

    def said(self) -> tuple[str, ...]:
        """What Shoal itself has said on host 0 so far, such as why a compressor stays on."""
        return tuple(line for line in self._log(0) if line.startswith("shoal: "))

    def _log(self, number: int) -> list[str]:
        self._logs[number].seek(0)
        return self._logs[number].read().decode(errors="replace").strip().splitlines()

    def _last_words(self) -> str:
        """What a host that has ended said last."""
        for number, process in enumerate(self._processes):
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
            lines = self._log(number)
            if lines:
                return f"host {number} ended with code {process.returncode}: {lines[-1]}"
        return "a host ended without a word"

    def close(self) -> None:
        """End both."""
        self._selector.close()
        for process in self._processes:
            process.kill()  # nothing of theirs is worth keeping: every answer has been read
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        for log in self._logs:
            log.close()


@contextmanager
def start_pair(hosts: Hosts) -> Iterator[Pair]:
    """Start one process on each host and let them meet; they end with the block."""
    processes: list[subprocess.Popen[bytes]] = []
    logs: list[IO[bytes]] = []
    pair = None
    try:
        for number in range(2):
            # Appended to, for we read where the process writes. It is closed below, with the process.
            logs.append(tempfile.TemporaryFile("a+b"))  # noqa: SIM115
            processes.append(_start(hosts, number, logs[-1]))
        pair = Pair(processes, logs)
        pair.answers(STARTING, "meet")
        yield pair
    finally:
        if pair is not None:
            pair.close()
        else:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def _start(hosts: Hosts, number: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    program = python("benchmarks.network.start", str(os.getpid()), INTERFACE)
    mine = {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "SHOAL_RENDEZVOUS": f"tcp://{hosts.addresses[0]}:{PORT}",
        "SHOAL_HOST": hosts.names[number],
    }
    given = environment(mine)
    for name in ("SHOAL_OVERRIDES", "SHOAL_RECORD", "SHOAL_DRY_RUN", "SHOAL_LAUNCHER", "GLOO_SOCKET_IFNAME"):
        given.pop(name, None)
    # Ctrl-C is for the one who started them, who then ends them.
    return subprocess.Popen(
        hosts.command(number, *program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=given,
        start_new_session=True,
    )
