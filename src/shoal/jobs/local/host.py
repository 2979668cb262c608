"""What this host has for jobs: counted once, then in a file that anybody may edit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.jobs.local.state import Amount
from shoal.sealed import write_file

MEMORY_SHARE = 0.9
"""Of the memory; the rest is the system's."""


@dataclass(frozen=True)
class Host:
    """What jobs may have together."""

    cores: int
    memory: int
    cards: tuple[int, ...] = ()

    @property
    def capacity(self) -> Amount:
        return self.cores, self.memory, len(self.cards)


def read_host(folder: Path) -> Host:
    """What the file says, which is written where there is none."""
    file = folder / "host.json"
    if not file.is_file():
        found = count()
        body = {"cores": found.cores, "memory": found.memory, "devices": list(found.cards)}
        temporary = folder / f"host.json.{os.getpid()}"
        write_file(temporary, [json.dumps(body, indent=1).encode() + b"\n"])
        temporary.rename(file)
    try:
        body = json.loads(file.read_bytes())
        host = Host(int(body["cores"]), int(body["memory"]), tuple(map(int, body["devices"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); delete it, and what this host has is counted anew."
        ) from error
    if host.cores < 1:
        raise ConfigError(f"{file} says cores: {host.cores}; a host has at least 1.")
    return host


def count() -> Host:
    """Cores that this process may use, memory, and NVIDIA cards, without asking a driver."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cards = [int(name[6:]) for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return Host(len(os.sched_getaffinity(0)), int(memory * MEMORY_SHARE), tuple(sorted(cards)))
