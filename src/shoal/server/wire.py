"""The sockets of one process: it sends messages to others by their number, and gathers what they sent.

A node that listens has one ROUTER for all who connect; for each peer that it reaches by address it has one DEALER.
Nothing here blocks except `receive`, nothing is resent, and nothing is promised: a message arrives whole, once, and
in order with its sender's others, or it does not arrive. The protocol above repeats itself until it is answered.

With keys, all traffic is encrypted and only holders of the job's keys get in (CURVE; a handler of ZAP checks the
client's). Without keys, nothing leaves this host.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import re
import socket
import struct
import time
from types import TracebackType

import zmq
from zmq.utils import z85

from shoal.errors import ConfigError
from shoal.server.frame import PAYLOAD_LIMIT, BadFrame, decode, encode, in_pieces
from shoal.server.keys import JobKeys
from shoal.server.message import Message

LOOPBACK = "tcp://127.0.0.1:*"
"""Listen for processes of this host, at whichever port is free."""
_QUEUE = 1000
"""Messages that wait for one peer, or from one."""
_AT_ONCE = 256
"""Messages that one `receive` takes from a socket, so that no sender can keep the others waiting."""
_CIPHERS = 2
"""Threads that encrypt and decrypt; connections are dealt out to them."""
_NAME = struct.Struct("<cQ")
"""How a node is called on the wire; names that begin with a zero byte belong to zmq."""
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/;\[\]]+):(\*|[0-9]{1,5})")

Socket = zmq.Socket[bytes]


class Wire:
    """One node's sockets. All calls come from one thread, except `wake`."""

    def __init__(self, me: int, keys: JobKeys | None, listen: str | None = LOOPBACK) -> None:
        """`me`: this node's number, unique in the job. `listen`: where others reach it; None: they do not.

        An address outside of this host has to be named, and needs keys.
        """
        self.me = me
        self.address = ""
        """Where others connect to, with the real port. Who listens at every interface knows his own host name."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.refused = 0
        """Messages that were dropped because they were none."""
        self.unsent = 0
        """Messages that were not taken: no way to the peer, or too many wait for it already."""
        self._name, self._keys = _NAME.pack(b"n", me), keys
        if listen is not None:
            _check_address(listen, keys)
        # Without keys, threads of one process may meet in memory, for which they need the same context.
        self._context = zmq.Context(_CIPHERS) if keys is not None else zmq.Context.instance()
        self._dealers: dict[int, tuple[str, Socket]] = {}
        self._peers: dict[Socket, int] = {}
        self._router: Socket | None = None
        self._gate: _Gate | None = None
        self._poller = zmq.Poller()
        self._ears, self._alarm = socket.socketpair()
        self._ears.setblocking(False)
        self._alarm.setblocking(False)
        self._poller.register(self._ears.fileno(), zmq.POLLIN)
        self._closed = False
        if listen is not None:
            try:
                self._listen(listen)
            except BaseException:
                self.close()
                raise

    def _listen(self, address: str) -> None:
        if self._keys is not None:
            self._gate = _Gate(self._context, self._keys)  # before the first stranger can knock
            self._poller.register(self._gate.socket, zmq.POLLIN)
        self._router = router = self._socket(zmq.ROUTER, address)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that lost its connection comes back under its name before we have noticed that it was gone.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
            router.setsockopt(zmq.ZAP_DOMAIN, b"shoal")
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen at '{address}': {error.strerror}; name another.") from None
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller.register(router, zmq.POLLIN)

    def connect(self, peer: int, address: str) -> None:
        """From now on, messages to `peer` go to this address; they wait while it cannot be reached."""
        if self._closed:
            raise ValueError("this wire is closed")
        if peer in self._dealers and self._dealers[peer][0] == address:
            return
        _check_address(address, self._keys)
        self.disconnect(peer)
        dealer = self._socket(zmq.DEALER, address)
        dealer.setsockopt(zmq.ROUTING_ID, self._name)
        if self._keys is not None:
            taken = [other.getsockopt(zmq.AFFINITY) for _, other in self._dealers.values()]
            dealer.setsockopt(zmq.AFFINITY, min((1 << n for n in range(_CIPHERS)), key=taken.count))
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close()
            raise ConfigError(f"cannot connect to '{address}': {error.strerror}.") from None
        self._dealers[peer], self._peers[dealer] = (address, dealer), peer
        self._poller.register(dealer, zmq.POLLIN)

    def disconnect(self, peer: int) -> None:
        """Give up the connection that was made to `peer`, and all that still waits for it."""
        if peer in self._dealers:
            _, dealer = self._dealers.pop(peer)
            del self._peers[dealer]
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def send(self, peer: int, message: Message) -> bool:
        """Hand over a message; False if there is no way to `peer` or its queue is full. Never waits.

        The tensor's memory is sent as it lies there: it must not change until the peer has answered. If it does, the
        peer drops the message, for its checksum is wrong.
        """
        frames = encode(message) if self._keys is None else in_pieces(encode(message))
        size = sum(map(len, frames))
        if peer in self._dealers:
            target = self._dealers[peer][1]
        elif self._router is not None:
            target = self._router
            frames.insert(0, _NAME.pack(b"n", peer))
        else:
            self.unsent += 1
            return False
        try:
            target.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.unsent += 1
            return False
        self.sent_bytes += size
        return True

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """What has arrived, with its senders; waits up to `timeout` seconds for the first, or until `wake`.

        Tensors lie in the memory that they arrived in: they are only to be read.
        """
        if self._closed:
            raise ValueError("this wire is closed")
        arrived: list[tuple[int, Message]] = []
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            woken = False
            for source, _ in self._poller.poll(math.ceil(left * 1000)):
                if self._gate is not None and source is self._gate.socket:
                    self._gate.answer()
                elif isinstance(source, zmq.Socket):
                    self._take(source, arrived)
                else:
                    woken = True
                    with contextlib.suppress(BlockingIOError):
                        self._ears.recv(4096)
            if arrived or woken or left == 0:
                return arrived

    def wake(self) -> None:
        """Have `receive` return at once, now or when it is next called. For other threads."""
        with contextlib.suppress(OSError):  # already full of alarms, or closed
            self._alarm.send(b"!")

    def close(self, linger: float = 0.0) -> None:
        """End it. What was sent and has not left yet gets `linger` seconds more."""
        if self._closed:
            return
        self._closed = True
        late = int(linger * 1000)
        for _, dealer in self._dealers.values():
            dealer.close(linger=late)
        if self._router is not None:
            self._router.close(linger=late)
        if self._gate is not None:
            self._gate.socket.close(linger=0)
        self._dealers, self._peers, self._router = {}, {}, None
        self._ears.close()
        self._alarm.close()
        if self._keys is not None:
            self._context.term()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, kind: int, address: str) -> Socket:
        made: Socket = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, _QUEUE)
        made.setsockopt(zmq.RCVHWM, _QUEUE)
        made.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_LIMIT)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a host that vanished is noticed after a minute
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        made.setsockopt(zmq.IPV6, "[" in address)
        return made

    def _take(self, source: Socket, arrived: list[tuple[int, Message]]) -> None:
        for _ in range(_AT_ONCE):
            try:
                frames = [frame.buffer for frame in source.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            self.received_bytes += sum(map(len, frames))
            try:
                sender = _sender(frames.pop(0)) if source is self._router else self._peers[source]
                arrived.append((sender, decode(frames)))
            except BadFrame:
                self.refused += 1


class _Gate:
    """Lets in who connects with the client key of this job. zmq asks it at every handshake (ZAP)."""

    def __init__(self, context: zmq.Context[Socket], keys: JobKeys) -> None:
        self._key = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                # Version, number, domain, address, name, mechanism, then the client's key.
                known = len(question) == 7 and question[5] == b"CURVE"
                known = known and hmac.compare_digest(question[6], self._key)
                verdict = (b"200", b"OK") if known else (b"400", b"not of this job")
                self.socket.send_multipart([b"1.0", question[1], *verdict, b"", b""], zmq.NOBLOCK)


def _sender(name: memoryview) -> int:
    letter, number = _NAME.unpack(name) if len(name) == _NAME.size else (b"", 0)
    if letter != b"n":
        raise BadFrame("a sender without a number")
    return int(number)


def _check_address(address: str, keys: JobKeys | None) -> None:
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
