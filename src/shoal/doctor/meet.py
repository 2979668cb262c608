"""Hosts meet at host 0, which asks and is answered: a line of JSON each way, nothing else.

Host 0 is asked too, by a thread of its own through a socket: so all hosts are alike.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from shoal.doctor.finding import Facts
from shoal.errors import ConfigError

LINE = 1 << 20
"""The longest line that is read: somebody else may talk to this port."""
ANSWER_SECONDS = 20.0
HELLO_SECONDS = 5.0
GREETING = "shoal doctor"


def address_of(at: str) -> tuple[str, int]:
    """ADDRESS:PORT in its two parts.

    >>> address_of("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    """
    address, _, port = at.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536 or ":" in address:
        raise ConfigError(f"--at {at} is not ADDRESS:PORT; write it like --at 10.0.0.1:29500.")
    return address, int(port)


class NoAnswer(Exception):
    """A host has not answered, or not in our language."""


@dataclass
class Channel:
    """A line each way."""

    connection: socket.socket
    rest: bytes = b""

    def say(self, message: Facts) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, seconds: float) -> Facts:
        """The next line, or NoAnswer."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            if len(self.rest) > LINE:
                raise NoAnswer(f"more than {LINE} bytes in one line")
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                got = self.connection.recv(1 << 16)
            except TimeoutError:
                raise NoAnswer(f"no answer in {seconds:.0f} s") from None
            except OSError as error:
                raise NoAnswer(error.strerror or str(error)) from None
            if not got:
                raise NoAnswer("it has hung up")
            self.rest += got
        line, _, self.rest = self.rest.partition(b"\n")
        return read_line(line)

    def ask(self, message: Facts) -> Facts:
        """Say one thing and hear the answer."""
        try:
            self.say(message)
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from None
        answer = self.hear(ANSWER_SECONDS)
        if "error" in answer:
            raise NoAnswer(str(answer["error"])[:200])
        return answer


def read_line(line: bytes) -> Facts:
    """One message; NoAnswer if it is none.

    >>> read_line(b'{"do": "clock"}')
    {'do': 'clock'}
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise NoAnswer(f"{line[:40]!r} is no message of `shoal doctor`") from None
    if not isinstance(message, dict):
        raise NoAnswer(f"{line[:40]!r} is no message of `shoal doctor`")
    return cast(Facts, message)


@dataclass
class Guest:
    """A host that has come to host 0."""

    channel: Channel
    address: str
    """Where others reach it."""


def receive(
    listener: socket.socket, hosts: int, seconds: float, tell: Callable[[str], None]
) -> Mapping[int, Guest]:
    """On host 0: all others, as far as they come within that time."""
    found: dict[int, Guest] = {}
    deadline = time.monotonic() + seconds
    told = time.monotonic() + 2.0
    while len(found) < hosts - 1 and time.monotonic() < deadline:
        if not select.select([listener], [], [], 0.2)[0]:
            if time.monotonic() > told:
                absent = [str(host) for host in range(1, hosts) if host not in found]
                tell(f"waiting for host {', '.join(absent)}: start the same command there, with its --host")
                told = deadline
            continue
        connection, (address, *_) = listener.accept()
        channel = Channel(connection)
        with suppress(NoAnswer, OSError):
            hello = channel.hear(HELLO_SECONDS)
            host = hello.get("host")
            fits = hello.get("hello") == GREETING and hello.get("hosts") == hosts
            if fits and isinstance(host, int) and 0 < host < hosts and host not in found:
                channel.say({"hello": GREETING})
                found[host] = Guest(channel, str(address))
                continue
            reason = f"host 0 has --hosts {hosts}, and no place for --host {host} of {hello.get('hosts')}"
            channel.say({"error": reason})
        connection.close()
    return found


def call(at: str, host: int, hosts: int, seconds: float, tell: Callable[[str], None]) -> Channel:
    """On another host: the way to host 0."""
    address, port = address_of(at)
    deadline = time.monotonic() + seconds
    told, why = time.monotonic() + 2.0, ""
    while time.monotonic() < deadline:
        try:
            channel = Channel(socket.create_connection((address, port), timeout=HELLO_SECONDS))
            channel.say({"hello": GREETING, "host": host, "hosts": hosts})
            answer = channel.hear(deadline - time.monotonic())
            if answer.get("hello") == GREETING:
                return channel
            raise ConfigError(f"{at} has refused this host: {str(answer.get('error', answer))[:200]}.")
        except NoAnswer as error:
            raise ConfigError(
                f"{at} is not answered by `shoal doctor` ({error}); choose another port."
            ) from None
        except OSError as error:
            why = error.strerror or str(error)
            if time.monotonic() > told:
                tell(f"waiting for host 0 at {at} ({why})")
                told = deadline
            time.sleep(0.2)
    raise ConfigError(
        f"host 0 was not reached at {at} in {seconds:.0f} s ({why}); start the same command there with --host 0, or "
        "see whether a firewall or a route is between."
    )
