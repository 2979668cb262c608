"""Authentication: which addresses a process may listen at, and which keys a client needs to connect."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re

import zmq
from zmq.utils import z85

from shoal.errors import ConfigError
from shoal.server.transport.bulk import DOMAIN, Socket
from shoal.server.transport.keys import JobKeys

LOOPBACK = "tcp://127.0.0.1:*"
"""Listen for processes of this host, at whichever port is free."""
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/;\[\]]+):(\*|[0-9]{1,5})")


class Gate:
    """Lets in who connects with the client key of this job, or to the bulk socket with a one-time password.

    zmq asks it at every handshake (ZAP).
    """

    def __init__(self, context: zmq.Context[Socket], keys: JobKeys, words: set[bytes]) -> None:
        """`words`: each is good for one connection. A tap may read one, but not before it has been used."""
        self._key = z85.decode(keys.client_public)
        self._words = words
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                verdict = (b"200", b"OK") if self._knows(question) else (b"400", b"not of this job")
                self.socket.send_multipart([b"1.0", question[1], *verdict, b"", b""], zmq.NOBLOCK)

    def _knows(self, question: list[bytes]) -> bool:
        # Version, number, domain, address, name, mechanism, then the client's key, or a user and a word.
        if len(question) == 7 and question[5] == b"CURVE":
            # In constant time: how long a comparison takes must not tell how much of a key was right.
            return hmac.compare_digest(question[6], self._key)
        if (
            len(question) == 8
            and (question[2], question[5]) == (DOMAIN, b"PLAIN")
            and question[7] in self._words
        ):
            # One connection for each word.
            self._words.discard(question[7])
            return True
        return False


def host_in(address: str) -> str:
    """The host of an address, with its brackets; empty if it names none."""
    found = _TCP.fullmatch(address)
    return found[1] if found else ""


def check_address(address: str, keys: JobKeys | None) -> None:
    """Refuse what is no address, and what others could reach without keys."""
    kind = address.partition("://")[0]
    found = _TCP.fullmatch(address)
    if not found and (kind not in ("ipc", "inproc") or len(address) <= len(kind) + 3):
        raise ConfigError(f"'{address}' is not an address; write one like '{LOOPBACK}'.")
    if keys is not None and kind == "inproc":
        raise ConfigError(
            f"'{address}' is inside of one process, where keys protect nothing; leave them out."
        )
    if keys is None and found and not _stays_here(found[1].strip("[]")):
        raise ConfigError(f"'{address}' can be reached from other hosts; that takes the job's keys.")


def _stays_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
