"""A socket in the job's private folder, at which workers request parameter servers from their launcher.

Whether a script needs servers shows only once it runs, so they are started at the first request.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from shoal.cluster.server_supervisor import ServerSupervisor, Watch
from shoal.server.transport.keys import JobKeys
from shoal.world.private_folder import socket_path

_SECOND = "one `shoal run` has servers for one Run with strategy ps; start the script again for another."


class ServerBroker:
    """Answers workers with the address of the coordinator and the job's keys."""

    def __init__(self, folder: str, threads: str, watch: Watch, forget: Callable[[int], None]) -> None:
        self.path = str(Path(folder) / "launcher.sock")
        self._keys = JobKeys.make()
        self._servers = ServerSupervisor(threads, self._keys, watch, forget)
        self._workers: dict[int, int] = {}
        """By rank, the number by which servers know this worker."""
        self.replaces = False
        """Whether a killed worker can be replaced: workers exchange parameters with servers only."""
        self._started = False
        self._listener = socket.socket(socket.AF_UNIX)
        with socket_path(self.path) as address:
            self._listener.bind(address)
        self._listener.listen(64)
        watch(self._listener.fileno(), self._accept)
        self._servers.closing = lambda: [self._listener.fileno()]

    @property
    def descriptors(self) -> list[int]:
        """What a forked worker inherits and must close."""
        return [self._listener.fileno(), *self._servers.descriptors]

    def worker_ended(self, rank: int) -> None:
        """A worker has ended: its part of the step can go to others."""
        if rank in self._workers:
            self._servers.report_end(self._workers.pop(rank))

    def close(self) -> None:
        """End the servers."""
        self._servers.close()
        self._listener.close()

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        with line:
            line.settimeout(5.0)
            try:
                request = json.loads(line.makefile("rb").readline(65536))
                servers = int(request["servers"])
                rank = int(request["rank"])
                me = int(request["id"])
                if rank in self._workers:
                    line.sendall(json.dumps({"refused": _SECOND}).encode() + b"\n")
                    return
                self.replaces = self.replaces or bool(request["replaceable"])
                self._start(servers)
                self._workers[rank] = me
                answer = {"address": self._servers.address, "keys": self._keys.to_text()}
                line.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):
                return  # the worker ended before its request or the answer was complete

    def _start(self, servers: int) -> None:
        if not self._started:
            self._started = True
            if servers:
                self._servers.coordinate()
            for slot in range(servers):
                self._servers.serve(slot)
