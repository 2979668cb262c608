"""The bulk channel: a second pair of zmq sockets between two processes, without CURVE, for sealed tensors.

zmq encrypts a whole socket or none of it, so what is sealed already (cipher.py) needs a socket of its own. It is set up
when two processes of different hosts connect, or else when the first large tensor is to be sent. The two negotiate it
inside CURVE, by messages of kind BULK:

    connector -> listener   None: where is your bulk socket?
    listener -> connector   [port, word]: connect there, with this one-time password
    (the connector connects to that port with that word and sends an empty frame, the knock)
    listener -> connector   True: the knock arrived
    either -> the other     "ping", answered by "pong": everything sent before over CURVE has been read, so that from
                            now on a ticket arrives no later than its pieces
    either -> the other     False: your pieces do not arrive
    either -> the other     "cut": the remaining pieces of announced tensors will not come

A word admits one connection, so a connection that broke cannot come back by itself: the connector closes it, says False
and asks again.

Until the channel is known to work, and for good if it never does (a firewall, a process without `cryptography`), CURVE
carries tensors. Nothing that arrives here is trusted: the word keeps strangers from connecting, and a piece counts only
if the key of a ticket, which came inside CURVE, opens it.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import deque
from collections.abc import Callable

import zmq

from shoal.server.protocol.messages import Plain
from shoal.server.transport.cipher import PIECE, Part, seal
from shoal.server.transport.frames import BadFrame
from shoal.server.transport.inbox import Inbox

LEAST = 64 << 10
"""Bytes from which on a tensor is sealed; smaller ones stay in their message."""
DOMAIN = b"bulk"
"""ZAP domain of the bulk socket: tells the authenticator (auth.py) which of the two sockets is being connected to."""
_AT_ONCE = 16
"""Pieces read from a socket in a row. Tickets must get their turn before the inbox runs out of room for pieces."""
_PIECES = 64
"""Receive high-water mark, in pieces for each peer: bounds the memory that a stranger can fill."""
_AGAIN = 5.0
"""Seconds until a peer that has not answered is asked again."""
_LOST = 60.0
"""Seconds until a peer that did not receive its pieces is asked again."""
_WORDS = 4
"""Unused words for each peer: a peer may be told a new one before it has used the last."""

_NAME = struct.Struct("<cQ")
"""Routing id of a node: a letter and its number. zmq reserves ids that begin with a zero byte."""

Socket = zmq.Socket[bytes]
Say = Callable[[int, Plain], bool]


def name_of(node: int) -> bytes:
    """The routing id of a node.

    >>> number_of(name_of(256))
    256
    """
    return _NAME.pack(b"n", node)


def number_of(name: Part) -> int:
    """The node of a routing id."""
    letter, number = _NAME.unpack(name) if len(name) == _NAME.size else (b"", 0)
    if letter != b"n":
        raise BadFrame("a sender without a number")
    return int(number)


def open_socket(context: zmq.Context[Socket], kind: int, address: str) -> Socket:
    """A socket whose TCP keepalive notices after a minute that a host is gone."""
    made: Socket = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    made.setsockopt(zmq.IPV6, "[" in address)
    return made


class Bulk:
    """One process's sockets for sealed tensors."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        poller: zmq.Poller,
        me: int,
        words: set[bytes],
        say: Say,
        inbox: Inbox,
    ) -> None:
        """`words`: one-time passwords, shared with the authenticator. `say`: sends a BULK message inside CURVE."""
        self._context = context
        self._poller = poller
        self._me = me
        self._words = words
        self._say = say
        self._inbox = inbox
        self._router: Socket | None = None
        self._port = 0
        self._dealers: dict[int, tuple[int, Socket]] = {}
        """Peer -> its bulk port, and the socket that is connected to it."""
        self._peers: dict[Socket, int] = {}
        self._unused_words: dict[int, deque[bytes]] = {}
        """Peer -> the words it was told and has not used. Only these peers may knock."""
        self._open: set[int] = set()
        """Peers whose connection has been confirmed by a knock: pieces of theirs are read."""
        self._reached: set[int] = set()
        """Peers that have answered a ping: pieces may be sent to them."""
        self._next: dict[int, float] = {}
        """Peer -> when it may be asked again."""

    def listen(self, host: str) -> None:
        """Listen at a free port of `host`, which is written as in an address."""
        router = self._socket(zmq.ROUTER, host)
        # MANDATORY: sending to a peer whose connection ended fails (EHOSTUNREACH) and is not dropped silently.
        # HANDOVER: a peer that connects again under its id replaces its old connection.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            self._port = router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError:
            router.close()  # no port is free: CURVE carries all tensors
            return
        self._router = router
        self._poller.register(router, zmq.POLLIN)

    def reaches(self, peer: int) -> bool:
        """Whether pieces may be sent to `peer`."""
        return peer in self._reached

    def ask(self, peer: int, connects: bool, now: float) -> None:
        """Start the negotiation with `peer`; `connects`: this process is the connector."""
        if now >= self._next.get(peer, 0.0) and (connects or self._port):
            # Set before the answer: messages to this peer go on over CURVE meanwhile, and each of them would ask again.
            self._next[peer] = now + _AGAIN
            if connects:
                self._say(peer, None)
            else:
                self._tell(peer)

    def hear(self, peer: int, said: Plain, host: str, now: float) -> None:
        """Handle a BULK message of `peer`; `host`: where the peer listens, if this process is the connector."""
        if said is None and self._port:
            self._tell(peer)
        elif isinstance(said, list):
            match said:
                # `type(port) is int`: a bool is an int for `case int()`, and the other side is not trusted.
                case [int(port), str(word)] if host and type(port) is int and 0 < port < 1 << 16:
                    if word.isascii() and 0 < len(word) < 100:
                        self._knock(peer, host, port, word)
        elif said is True and peer in self._dealers:
            self._open.add(peer)
            self._say(peer, "ping")
        elif said is False:
            self._reached.discard(peer)
            # Each attempt over a channel that swallows pieces costs the receiver its patience (inbox.PATIENCE).
            self._next[peer] = now + _LOST
            self._give_up(peer)
        elif said == "ping":
            self._say(peer, "pong")
        # The peer has read all that CURVE carried before: from now on a ticket comes no later than its pieces.
        elif said == "pong" and peer in self._open:
            self._reached.add(peer)
        elif said == "cut":
            self._inbox.cut(peer, now)

    def forget(self, peer: int) -> None:
        """Drop the channel to `peer` and all state of it."""
        for some in (self._open, self._reached):
            some.discard(peer)
        self._next.pop(peer, None)
        self._forget_words(peer)
        self._disconnect(peer)

    def send(self, peer: int, payload: Part, ticket: bytes, announce: Callable[[], bool]) -> int:
        """Seal a tensor and queue its pieces. Returns their bytes; 0 if the channel is gone and nothing was announced.

        `announce` sends the message with the ticket: after the first piece, which shows that the socket still takes
        pieces, and before the others, so that the receiver does not have to buffer them.
        """
        _, dealer = self._dealers.get(peer, (0, None))
        target = self._router if dealer is None else dealer
        name = [name_of(peer)] if dealer is None else []
        if target is None:
            return 0
        total = 0
        try:
            for piece in seal(payload, ticket):
                target.send_multipart([*name, piece], zmq.NOBLOCK, copy=False)
                # CURVE refused the ticket, so nobody waits for this piece; the receiver drops it after a while.
                if not total and not announce():
                    return 0
                total += len(piece)
        except zmq.ZMQError as error:
            # The queue has no limit, so these two mean that the connection has ended.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._reached.discard(peer)
            if total:
                self._say(peer, "cut")
            self._give_up(peer)
        return total

    def owns(self, source: object) -> bool:
        """Whether `source` is a socket of this channel."""
        return source is self._router or source in self._peers

    def take(self, source: Socket) -> int:
        """Read pieces from a socket of this channel. Returns the bytes read."""
        total = 0
        for _ in range(_AT_ONCE):
            try:
                *name, piece = (frame.buffer for frame in source.recv_multipart(zmq.NOBLOCK, copy=False))
                sender = number_of(name[0]) if source is self._router else self._peers[source]
            except zmq.Again:
                break
            except BadFrame:
                self._inbox.refused += 1
                continue
            total += len(piece)
            if len(piece) and sender in self._open:
                self._inbox.piece(sender, piece, time.monotonic())
            # An empty frame is the knock. It counts only from a peer that was given a word: the routing id is whatever
            # the sender claims, the word was checked when it connected.
            elif not len(piece) and sender in self._unused_words:
                self._forget_words(sender)
                self._open.add(sender)
                self._say(sender, True)
                self._say(sender, "ping")
        return total

    def close(self, linger: int) -> None:
        """`linger`: milliseconds that unsent pieces get."""
        for _, dealer in self._dealers.values():
            dealer.close(linger=linger)
        if self._router is not None:
            self._router.close(linger=linger)
        self._dealers = {}
        self._peers = {}
        self._router = None

    def _tell(self, peer: int) -> None:
        word = secrets.token_hex(16)
        words = self._unused_words.setdefault(peer, deque())
        words.append(word.encode())
        self._words.add(word.encode())
        # Each unused word would admit a connection for as long as this process lives.
        if len(words) > _WORDS:
            self._words.discard(words.popleft())
        self._say(peer, [self._port, word])

    def _forget_words(self, peer: int) -> None:
        self._words.difference_update(self._unused_words.pop(peer, ()))

    def _knock(self, peer: int, host: str, port: int, word: str) -> None:
        """Connect to the bulk socket of `peer` and knock. If the port is known, keep the connection and its queue."""
        known, dealer = self._dealers.get(peer, (0, None))
        if dealer is not None and known == port:
            try:
                dealer.send(b"", zmq.NOBLOCK)
                return
            except zmq.Again:
                pass  # the connection has ended, and its word is used up: connect anew
        self._disconnect(peer)
        dealer = self._socket(zmq.DEALER, host)
        dealer.setsockopt(zmq.ROUTING_ID, name_of(self._me))
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"shoal")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, word.encode())
        dealer.connect(f"tcp://{host}:{port}")
        self._dealers[peer] = (port, dealer)
        self._peers[dealer] = peer
        self._poller.register(dealer, zmq.POLLIN)
        dealer.send(b"", zmq.NOBLOCK)

    def _give_up(self, peer: int) -> None:
        """Close a connection that this process made, and drop messages that still wait for pieces over it."""
        if peer in self._dealers:
            self._open.discard(peer)
            self._disconnect(peer)
            self._inbox.cut(peer, time.monotonic())
            self._say(peer, False)

    def _disconnect(self, peer: int) -> None:
        if peer in self._dealers:
            _, dealer = self._dealers.pop(peer)
            del self._peers[dealer]
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def _socket(self, kind: int, host: str) -> Socket:
        made = open_socket(self._context, kind, host)
        made.setsockopt(zmq.SNDHWM, 0)  # unbounded: CURVE's queue has accepted the message
        made.setsockopt(zmq.RCVHWM, _PIECES)
        made.setsockopt(zmq.MAXMSGSIZE, 2 * PIECE)
        return made
