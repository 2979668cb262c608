"""Two hosts on one machine: network namespaces joined by a cable whose rate can be set.

Each namespace has interfaces, addresses and counters of its own; nothing of it touches the machine's network. The rate
is a token bucket (`tc … tbf`) at both ends. Names carry the process id of their maker: what a maker that was killed has
left behind is removed by the next one.

When to use: to measure or test what happens between hosts, with one machine and root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from shoal.errors import ConfigError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NAME = "shoal-bench"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Bits per second.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000, 2500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 10**5:
        raise ConfigError(f"--rates {text}: a rate is like 100mbit or 1gbit, and at least 100kbit.")
    return rate


def show_rate(rate: int) -> str:
    """A rate as people say it.

    >>> show_rate(100_000_000), show_rate(2_500_000_000)
    ('100 Mb/s', '2.5 Gb/s')
    """
    unit, word = (10**9, "Gb/s") if rate >= 10**9 else (10**6, "Mb/s")
    return f"{rate / unit:g} {word}"


@dataclass(frozen=True)
class Cable:
    """Two namespaces and the interface of each."""

    hosts: tuple[str, str]
    ends: tuple[str, str]

    def limit(self, rate: int | None) -> None:
        """Let both ends send so many bits a second; None: as fast as it goes."""
        for host, end in zip(self.hosts, self.ends, strict=True):
            _call("tc", "-n", host, "qdisc", "del", "dev", end, "root", check=False)
            if rate is not None:
                # What may leave at once: a thousandth of a second's worth, and never less than one large packet.
                burst = max(1 << 16, rate // 8 // 1000)
                words = ("rate", f"{rate}bit", "burst", str(burst), "latency", "50ms")
                _call("tc", "-n", host, "qdisc", "add", "dev", end, "root", "tbf", *words)

    def command(self, host: int, *words: str) -> list[str]:
        """The words that run a command on one of the hosts."""
        return ["ip", "netns", "exec", self.hosts[host], *words]


@contextmanager
def two_hosts() -> Iterator[Cable]:
    """Make two hosts; they are gone at the end, also after Ctrl-C and `kill`."""
    _check()
    tag = uuid.uuid4().hex[:6]
    first, second = (f"{_NAME}-{os.getpid()}-{tag}-{number}" for number in range(2))
    cable = Cable((first, second), (f"sh{tag}0", f"sh{tag}1"))
    _clear_left_over()
    with _ended_by_signals():
        try:
            _connect(cable)
            yield cable
        finally:
            _remove(cable.hosts)


def _connect(cable: Cable) -> None:
    for host in cable.hosts:
        _call("ip", "netns", "add", host)
    (one, other), (end, far) = cable.hosts, cable.ends
    _call("ip", "link", "add", end, "netns", one, "type", "veth", "peer", "name", far, "netns", other)
    for host, name, address in zip(cable.hosts, cable.ends, ADDRESSES, strict=True):
        _call("ip", "-n", host, "addr", "add", f"{address}/24", "dev", name)
        _call("ip", "-n", host, "link", "set", name, "up")
        _call("ip", "-n", host, "link", "set", "lo", "up")


def _check() -> None:
    for word in ("ip", "tc"):
        if shutil.which(word) is None:
            raise ConfigError(f"no `{word}` command here: two hosts are made with it; install iproute2.")
    if os.geteuid() != 0:
        raise ConfigError(
            f"only root may make network namespaces, and you are user {os.geteuid()}; start it with sudo."
        )


def _clear_left_over() -> None:
    """Remove namespaces whose maker was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for match in re.finditer(rf"^({_NAME}-(\d+)-\w+-[01])\b", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{match[2]}"):
            _remove((match[1],))


def _remove(hosts: tuple[str, ...]) -> None:
    """The cable goes with its ends. An impatient second Ctrl-C does not come between."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        for host in hosts:
            _call("ip", "netns", "del", host, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the signals that end a process end it as Ctrl-C does: through every `finally`."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(*words: str, check: bool = True) -> None:
    # In a session of its own: Ctrl-C at the terminal must not stop what cleans up.
    done = subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
    if check and done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise ConfigError(
            f"cannot make two hosts here: `{' '.join(words)}` says: {said}; it needs network namespaces and tbf."
        )
