"""Parameter servers without a launcher of workers: they outlive the workers, and serve one job on all its hosts."""

from __future__ import annotations

import selectors
import signal
import sys
import time
from pathlib import Path

from shoal.cluster.server_supervisor import ServerSupervisor
from shoal.cluster.watch import Interrupts
from shoal.errors import ConfigError
from shoal.server.transport.keys import JobKeys


def run_servers(listen: str, join: str, keys: Path, servers: int, threads: str) -> None:
    """Run servers here until a signal ends them; without `join`, the coordinator too."""
    address, _, port = listen.rpartition(":")
    if not address or not port.isdigit():
        raise ConfigError(f"--listen {listen} is not ADDRESS:PORT; write it like --listen 127.0.0.1:7000.")
    if address.strip("[]") in ("", "*", "0.0.0.0", "::"):
        raise ConfigError(
            f"--listen {listen} is every address of this host; name the one by which workers reach it."
        )
    if servers < 1:
        raise ConfigError(f"--servers {servers} is too few; it must be at least 1.")
    if join and not keys.exists():
        raise ConfigError(
            f"there are no keys at {keys}; copy the file that the coordinator's host has supervisor."
        )
    if not keys.exists():
        JobKeys.make().write(keys)
    known = JobKeys.read(keys)
    selector = selectors.EpollSelector()
    with Interrupts() as interrupts:
        selector.register(interrupts.descriptors[0], selectors.EVENT_READ, interrupts.collect)
        supervisor = ServerSupervisor(
            threads,
            known,
            lambda descriptor, action: _register(selector, descriptor, action),
            lambda descriptor: _unregister(selector, descriptor),
            generation=int(time.time()),  # servers on other hosts may have had a coordinator here before
        )
        try:
            with interrupts.held():
                if join:
                    supervisor.address = f"tcp://{join}"
                else:
                    supervisor.coordinate(f"tcp://{listen}")
                for slot in range(servers):
                    supervisor.serve(-1 if join else slot, f"tcp://{address}:*")
            where = join or supervisor.address.removeprefix("tcp://")
            text = f"{servers} server{'s' if servers > 1 else ''} of the coordinator at {where}; keys: {keys}"
            print(
                f'shoal: {text}\nshoal: workers use --strategy "ps(at={where}, keys={keys})"', file=sys.stderr
            )
            while not interrupts.received:
                for key, _ in selector.select():
                    key.data()
        finally:
            supervisor.close()
            selector.close()
    number = interrupts.received[0]
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _register(selector: selectors.BaseSelector, descriptor: int, action: object) -> None:
    selector.register(descriptor, selectors.EVENT_READ, action)


def _unregister(selector: selectors.BaseSelector, descriptor: int) -> None:
    selector.unregister(descriptor)
