"""Several hosts on one machine: network namespaces joined by a switch, at a rate that can be set.

    with make_hosts(3) as hosts:
        hosts.limit(10**8)
        subprocess.run(hosts.command(0, "ping", "-c1", hosts.addresses[2]))

Each namespace has an interface, an address and counters of its own. The switch is a bridge in one namespace more, so
that nothing touches the machine's network. Names carry the process id of their maker: what a maker that was killed has
left behind is removed by the next one.

When to use: to measure or test what happens between hosts, with one machine and root.
"""

from __future__ import annotations

import ctypes
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

INTERFACE = "shoal0"
"""What its interface is called on each host."""
_NAME = "shoal-host"
_BRIDGE = "bridge0"
_NEW_NET = 0x40000000
"""CLONE_NEWNET of <sched.h>."""


def address_of(host: int) -> str:
    """Where a host is found, for who has only its number.

    >>> address_of(0)
    '10.77.0.1'
    """
    return f"10.77.0.{host + 1}"


@dataclass(frozen=True)
class Hosts:
    """The namespaces of some hosts, and that of the switch between them."""

    names: tuple[str, ...]
    switch: str

    @property
    def addresses(self) -> tuple[str, ...]:
        """One of each host."""
        return tuple(address_of(host) for host in range(len(self.names)))

    def limit(self, rate: int | None) -> None:
        """Let each host send, and receive, so many bits a second; None: as fast as it goes.

        Token buckets (`tc … tbf`): one at the host for what it sends, one at its port of the switch for what it gets.
        """
        for host, name in enumerate(self.names):
            for namespace, end in ((name, INTERFACE), (self.switch, _port(host))):
                _call("tc", "-n", namespace, "qdisc", "del", "dev", end, "root", check=False)
                if rate is not None:
                    # What may leave at once: a thousandth of a second's worth, and never less than one large packet.
                    burst = max(1 << 16, rate // 8 // 1000)
                    words = ("rate", f"{rate}bit", "burst", str(burst), "latency", "50ms")
                    _call("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", "tbf", *words)

    def command(self, host: int, *words: str) -> list[str]:
        """The words that run a command on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def enter(self, host: int) -> None:
        """Move the calling thread, and those that it starts from now on, to one of the hosts.

        Call it before a process has other threads. Unlike under `command`, /sys still shows the interfaces of before.
        """
        path = f"/run/netns/{self.names[host]}"
        with open(path) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Make so many hosts; they are gone at the end, also after Ctrl-C and `kill`."""
    _check()
    name = f"{_NAME}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    hosts = Hosts(tuple(f"{name}-{host}" for host in range(count)), f"{name}-switch")
    _clear_left_over()
    with _ended_by_signals():
        try:
            _connect(hosts)
            yield hosts
        finally:
            _remove((*hosts.names, hosts.switch))


def _port(host: int) -> str:
    return f"{INTERFACE}-{host}"


def _connect(hosts: Hosts) -> None:
    switch = hosts.switch
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "name", _BRIDGE, "type", "bridge")
    _call("ip", "-n", switch, "link", "set", _BRIDGE, "up")
    for host, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
        port = _port(host)
        _call("ip", "netns", "add", name)
        # Both ends are made where they belong, and are never seen in the machine's own network.
        ends = (INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _call("ip", "link", "add", *ends)
        _call("ip", "-n", switch, "link", "set", port, "master", _BRIDGE, "up")
        _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _call("ip", "-n", name, "link", "set", INTERFACE, "up")
        _call("ip", "-n", name, "link", "set", "lo", "up")


def _check() -> None:
    for word in ("ip", "tc"):
        if shutil.which(word) is None:
            raise ConfigError(f"no `{word}` command here: hosts are made with it; install iproute2.")
    if os.geteuid() != 0:
        raise ConfigError(
            f"only root may make network namespaces, and you are user {os.geteuid()}; start it with sudo."
        )


def _clear_left_over() -> None:
    """Remove namespaces whose maker was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for match in re.finditer(rf"^({_NAME}-(\d+)-\w+-(?:\d+|switch))\b", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{match[2]}"):
            _remove((match[1],))


def _remove(namespaces: tuple[str, ...]) -> None:
    """Interfaces go with their namespaces. An impatient second Ctrl-C does not come between."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        for namespace in namespaces:
            _call("ip", "netns", "del", namespace, check=False)
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
            f"cannot make hosts here: `{' '.join(words)}` says: {said}; it needs network namespaces, bridges and tbf."
        )
