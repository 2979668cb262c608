"""The sockets of one process: it sends messages to others by their number, and gathers what they sent.

A node that listens has one ROUTER for all who connect; for each peer that it reaches by address it has one DEALER.
Nothing here blocks except `receive`, nothing is resent, and nothing is promised: a message arrives whole, once, and
in order with its sender's others, or it does not arrive. The protocol above repeats itself until it is answered.

With keys, all traffic is encrypted and only holders of the job's keys get in (CURVE; a handler of ZAP checks the
client's). Large tensors are sealed and go another way (bulk.py). Without keys, nothing leaves this host.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from dataclasses import replace
from types import TracebackType

import zmq

from shoal.errors import ConfigError
from shoal.server.protocol.messages import Message, MessageKind, Plain
from shoal.server.transport.auth import LOOPBACK, Gate, check_address, host_in
from shoal.server.transport.bulk import LEAST, Bulk, Socket, name_of, number_of, open_socket
from shoal.server.transport.cipher import Part, can_seal, new_ticket
from shoal.server.transport.frames import PAYLOAD_LIMIT, BadFrame, decode, encode, kind_of, payload_of
from shoal.server.transport.inbox import Inbox
from shoal.server.transport.keys import JobKeys

_QUEUE = 1000
"""Messages that wait for one peer, or from one."""
_AT_ONCE = 256
"""Messages that one `receive` takes from a socket, so that no sender can keep the others waiting."""
_THREADS = 2
"""They talk to the system and encrypt; zmq deals connections out to them."""


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
        self.unsent = 0
        """Messages that were not taken: no way to the peer, or too many wait for it already."""
        self._keys = keys
        if listen is not None:
            check_address(listen, keys)
        # Without keys, threads of one process may meet in memory, for which they need the same context.
        self._context = zmq.Context(_THREADS) if keys is not None else zmq.Context.instance()
        self._dealers: dict[int, tuple[str, Socket]] = {}
        self._peers: dict[Socket, int] = {}
        self._router: Socket | None = None
        self._gate: Gate | None = None
        self._poller = zmq.Poller()
        self._inbox = Inbox()
        self._bulk: Bulk | None = None
        words = set[bytes]()
        if keys is not None and can_seal():
            self._bulk = Bulk(self._context, self._poller, me, words, self._say, self._inbox)
        self._ears, self._alarm = socket.socketpair()
        self._ears.setblocking(False)
        self._alarm.setblocking(False)
        # zmq sockets may be used by one thread only, and poll does not notice an Event: a byte in a pipe wakes it.
        self._poller.register(self._ears.fileno(), zmq.POLLIN)
        self._closed = False
        if listen is not None:
            try:
                self._listen(listen, words)
            except BaseException:
                self.close()
                raise

    @property
    def refused(self) -> int:
        """Messages that were dropped because they were none."""
        return self._inbox.refused

    def _listen(self, address: str, words: set[bytes]) -> None:
        if self._keys is not None:
            self._gate = Gate(self._context, self._keys, words)  # before the first stranger can knock
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
        if self._bulk is not None and (host := host_in(self.address)):
            self._bulk.listen(host)

    def connect(self, peer: int, address: str, ahead: bool = False) -> None:
        """From now on, messages to `peer` go to this address; they wait while it cannot be reached.

        `ahead`: the two agree on a way for large tensors before there is one to send.
        """
        if self._closed:
            raise ValueError("this wire is closed")
        if peer in self._dealers and self._dealers[peer][0] == address:
            return
        check_address(address, self._keys)
        self.disconnect(peer)
        dealer = self._socket(zmq.DEALER, address)
        dealer.setsockopt(zmq.ROUTING_ID, name_of(self.me))
        if self._keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close()
            raise ConfigError(f"cannot connect to '{address}': {error.strerror}.") from None
        self._dealers[peer] = (address, dealer)
        self._peers[dealer] = peer
        self._poller.register(dealer, zmq.POLLIN)
        if ahead and self._bulk is not None:
            self._bulk.ask(peer, True, time.monotonic())

    def disconnect(self, peer: int) -> None:
        """Give up the connection that was made to `peer`, and all that still waits for it."""
        if peer in self._dealers:
            _, dealer = self._dealers.pop(peer)
            del self._peers[dealer]
            self._poller.unregister(dealer)
            dealer.close(linger=0)
            self._inbox.forget(peer)
            if self._bulk is not None:
                self._bulk.forget(peer)

    def send(self, peer: int, message: Message) -> bool:
        """Hand over a message; False if there is no way to `peer` or its queue is full. Waits for nobody.

        Unless it is sealed (`seals`), the tensor's memory is sent as it lies there: it must not change until the peer
        has answered. If it does, the peer drops the message, for its checksum is wrong.
        """
        # Asked before: `_send_sealed` may find that the channel broke, and then the caller has made no copy of its own.
        promised = self.seals(peer, message)
        if _is_large(message) and self._bulk is not None and self._send_sealed(self._bulk, peer, message):
            return True
        if promised and message.tensor is not None:
            message = replace(message, tensor=message.tensor.clone())
        frames = encode(message)
        # Dropping is allowed: every protocol above sends again what is not answered.
        if not self._hand_over(peer, frames):
            self.unsent += 1
            return False
        self.sent_bytes += sum(map(len, frames))
        return True

    def seals(self, peer: int, message: Message) -> bool:
        """Whether `send` makes a copy of this message's tensor, which may change from then on."""
        return self._bulk is not None and _is_large(message) and self._bulk.reaches(peer)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """What has arrived, with its senders; waits up to `timeout` seconds for the first, or until `wake`.

        Tensors lie in the memory that they arrived in: they are only to be read.
        """
        if self._closed:
            raise ValueError("this wire is closed")
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            woken = False
            # Rounded up: with milliseconds rounded down to 0, the last one would be a busy loop.
            for source, _ in self._poller.poll(math.ceil(left * 1000)):
                if self._gate is not None and source is self._gate.socket:
                    # libzmq asks by ZAP before it lets a stranger in; this thread answers, since it owns the sockets.
                    self._gate.answer()
                elif self._bulk is not None and self._bulk.owns(source):
                    self.received_bytes += self._bulk.take(source)
                elif source == self._ears.fileno():
                    woken = True
                    with contextlib.suppress(BlockingIOError):
                        self._ears.recv(4096)
                elif not source.closed:  # what was said before it in this round may have ended its way
                    self._take(source)
            arrived = self._arrived()
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
        if self._bulk is not None:
            self._bulk.close(late)
        if self._gate is not None:
            self._gate.socket.close(linger=0)
        self._dealers = {}
        self._peers = {}
        self._router = None
        self._ears.close()
        self._alarm.close()
        if self._keys is not None:
            # Waits for lingering messages. The shared context of jobs without keys is not ours to end.
            self._context.term()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, kind: int, address: str) -> Socket:
        made = open_socket(self._context, kind, address)
        made.setsockopt(zmq.SNDHWM, _QUEUE)
        made.setsockopt(zmq.RCVHWM, _QUEUE)
        made.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_LIMIT)
        return made

    def _hand_over(self, peer: int, frames: list[Part]) -> bool:
        if peer in self._dealers:
            target = self._dealers[peer][1]
        elif self._router is not None:
            target = self._router
            # A router finds the connection by the id in the first frame; a dealer has one connection only.
            frames = [name_of(peer), *frames]
        else:
            return False
        try:
            target.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def _take(self, source: Socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                frames = [frame.buffer for frame in source.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            self.received_bytes += sum(map(len, frames))
            try:
                sender = number_of(frames.pop(0)) if source is self._router else self._peers[source]
            except BadFrame:
                self._inbox.refused += 1
                continue
            if kind_of(frames) == MessageKind.BULK:
                self._hear(sender, frames)
            else:
                self._inbox.letter(sender, frames, time.monotonic())

    def _hear(self, sender: int, frames: list[memoryview]) -> None:
        """What another wire says to this one; it does not wait behind tensors, for it is about them."""
        try:
            said = decode(frames).meta
        except BadFrame:
            self._inbox.refused += 1
            return
        if self._bulk is not None:
            address, _ = self._dealers.get(sender, ("", None))
            self._bulk.hear(sender, said, host_in(address), time.monotonic())

    def _arrived(self) -> list[tuple[int, Message]]:
        """Messages that are complete by now; senders whose pieces are overdue are told."""
        for sender in self._inbox.overdue(time.monotonic()):
            self._say(sender, False)
        return self._inbox.take_ready()

    def _send_sealed(self, bulk: Bulk, peer: int, message: Message) -> bool:
        """Send the tensor another way, and the message without it; False if there is no such way yet."""
        if not bulk.reaches(peer):
            bulk.ask(peer, peer in self._dealers, time.monotonic())
            return False
        ticket = new_ticket()
        frames = encode(message, ticket)
        sent = bulk.send(peer, payload_of(message), ticket, lambda: self._hand_over(peer, frames))
        self.sent_bytes += sent + (sum(map(len, frames)) if sent else 0)
        return sent > 0

    def _say(self, peer: int, said: Plain) -> bool:
        return self._hand_over(peer, encode(Message(MessageKind.BULK, meta=said)))


def _is_large(message: Message) -> bool:
    return message.tensor is not None and message.where is None and message.tensor.nbytes >= LEAST
