"""The file of hosts: one a line, as ssh knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

_LINE = re.compile(r"(?:(?P<user>[\w.-]+)@)?(?P<name>[A-Za-z0-9][\w.-]*)(?::(?P<port>\d{1,5}))?$", re.ASCII)


@dataclass(frozen=True)
class RemoteHost:
    """One host.

    >>> parse_host("me@node-1:2222")
    RemoteHost(name='node-1', user='me', port=2222)
    """

    name: str
    """A name, an address, or a Host of ~/.ssh/config."""
    user: str = ""
    port: int = 0

    @property
    def words(self) -> list[str]:
        """How ssh is told."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, "--", f"{self.user}@{self.name}" if self.user else self.name]


def parse_host(text: str) -> RemoteHost:
    """One line of the file."""
    found = _LINE.match(text)
    if found is None or int(found["port"] or 1) not in range(1, 65536):
        raise ConfigError(f"--hosts: {text!r} is no host; write a line like node-1 or me@node-1:22.")
    return RemoteHost(found["name"], found["user"] or "", int(found["port"] or 0))


def read_hosts(file: Path) -> list[RemoteHost]:
    """All hosts of a file; what follows a # is left out."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--hosts {file} cannot be read ({error}); give a number, or a file of hosts."
        ) from None
    hosts = [parse_host(line) for each in lines if (line := each.partition("#")[0].strip())]
    if not hosts:
        raise ConfigError(f"--hosts {file} names no host; write one a line, as node-1 or me@node-1:22.")
    return hosts
