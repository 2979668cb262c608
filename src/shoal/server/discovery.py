"""Where a worker finds its servers: the launcher starts them, or they stand alone, or the first worker has them.

Without a launcher of ours (plain `python`, torchrun) the first worker runs coordinator and servers as threads: right
for trying things out and for one process, while servers of their own survive their workers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.server.processes import Threads
from shoal.server.transport.keys import JobKeys
from shoal.world.private_folder import socket_path
from shoal.world.world import World

_SECONDS = 60.0
_ALONE = (
    "workers on several hosts need servers that all can reach: start them with `shoal server`, and say "
    "ps(at=ADDRESS:PORT, keys=FILE)."
)


@dataclass(frozen=True)
class Endpoint:
    """The address of the coordinator, and the keys for it."""

    address: str
    keys: JobKeys | None
    close: Callable[[], None] = lambda: None


def find_servers(
    world: World, me: int, servers: int, at: str = "", keys: str = "", replaceable: bool = True
) -> Endpoint:
    """The coordinator of this run's servers. Every worker that talks to them calls it; `me` is its number in the job.

    `replaceable`: whether another worker may be started in the place of this one if it is killed.
    """
    request = {"servers": 0 if at else servers, "rank": world.rank, "id": me, "replaceable": int(replaceable)}
    if at:
        if not keys:
            raise ConfigError(
                f"ps(at={at}) needs the servers' keys: keys=FILE, the file that `shoal server` wrote."
            )
        if world.launcher:  # it starts no servers, but another worker in the place of one that is killed
            ask_launcher(world.launcher, request)
        return Endpoint(f"tcp://{at}", JobKeys.read(Path(keys).expanduser()))
    if len(set(world.hosts)) > 1:
        raise ConfigError(_ALONE)
    if world.launcher:
        return ask_launcher(world.launcher, request)
    return _threads(world, servers, world.size if replaceable else 1)


def ask_launcher(path: str, request: dict[str, int]) -> Endpoint:
    """Have the launcher start servers, once for all workers."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_SECONDS)
        with socket_path(path) as address:
            line.connect(address)
        line.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            more = line.recv(65536)
            if not more:
                raise ConfigError("the launcher could not start the servers; its own message says why.")
            answer += more
    found = json.loads(answer)
    if "refused" in found:
        raise ConfigError(str(found["refused"]))
    return Endpoint(found["address"], JobKeys.from_text(found["keys"], "the launcher's answer"))


def _threads(world: World, servers: int, workers: int) -> Endpoint:
    if world.size == 1:
        keys = JobKeys.make()  # other users of this host can reach loopback too
        started = Threads(servers, keys)
        return Endpoint(started.address, keys, started.close)
    store = world.store
    assert store is not None
    turn = store.add(f"shoal/ps/{world.rank}", 1)  # the same on all ranks: they come here equally often
    if world.rank > 0:
        address, text = json.loads(store.get(f"shoal/ps/at/{turn}"))
        return Endpoint(address, JobKeys.from_text(text, "the first worker's answer"))
    keys = JobKeys.make()
    started = Threads(servers, keys, workers=workers)
    store.set(f"shoal/ps/at/{turn}", json.dumps([started.address, keys.to_text()]))
    return Endpoint(started.address, keys, started.close)
