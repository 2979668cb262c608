"""The second way between two processes that hold the job's keys: for sealed tensors, which need no encryption by zmq.

Beside each socket of CURVE there may be one without, made when two processes of different hosts meet, or else when
the first large tensor is to be sent. They agree on it inside CURVE, by messages of kind BULK:

    connector -> listener   None: where?            listener -> connector   a port and a word: there, and say this
    (the connector connects to that port with that word, and sends an empty frame: a knock)
    listener -> connector   True: it came           either -> the other     False: your pieces do not come
    either -> the other     "ping", answered by "pong": all that was sent before is read, so tickets will not be late
    either -> the other     "cut": the rest of what is announced will not come

Whoever connects and finds that the way does not work gives it up, says False, and asks where anew: a word is good for
one connection, so one that broke does not come back by itself.

Until it is known to work, and if it never does (a firewall, a process that cannot open seals), CURVE carries tensors
too. Nothing on this way is believed: a word that lets one connection in keeps strangers from the door, and a piece
counts only if the key of a ticket opens it.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from shoal.server.frame import BadFrame
from shoal.server.inbox import Inbox
from shoal.server.sealed import PIECE, Part, seal

LEAST = 64 << 10
"""Bytes of a tensor that is worth it."""
DOMAIN = b"bulk"
"""What zmq calls this door when it asks whom to let in."""
_AT_ONCE = 16
"""Pieces that are read from a socket before the tickets have their turn: far fewer than an inbox keeps without one."""
_PIECES = 64
"""Pieces that wait to be read, from one peer: a stranger fills no more memory than that."""
_AGAIN = 5.0
"""Seconds after which a peer that has not answered is asked once more."""
_LOST = 60.0
"""Seconds for which one that has not got its pieces is not asked."""
_WORDS = 4
"""That are good for one peer at a time: it may be told anew before it has used the last one."""

_NAME = struct.Struct("<cQ")
"""How a node is called on the wire; names that begin with a zero byte belong to zmq."""

Socket = zmq.Socket[bytes]
Say = Callable[[int, Any], bool]


def name_of(node: int) -> bytes:
    """What zmq calls a node, by its number.

    >>> number_of(name_of(256))
    256
    """
    return _NAME.pack(b"n", node)


def number_of(name: Part) -> int:
    """The reverse of `name_of`."""
    letter, number = _NAME.unpack(name) if len(name) == _NAME.size else (b"", 0)
    if letter != b"n":
        raise BadFrame("a sender without a number")
    return int(number)


def open_socket(context: zmq.Context[Socket], kind: int, address: str) -> Socket:
    """A socket that notices after a minute that a host has vanished."""
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
        """`words` open the door, once each. `say` tells a peer something inside CURVE, if it can."""
        self._context, self._poller, self._me, self._words, self._say = context, poller, me, words, say
        self._inbox = inbox
        self._router: Socket | None = None
        self._port = 0
        self._dealers: dict[int, tuple[int, Socket]] = {}
        """Peer -> the port that it told, and the way there."""
        self._peers: dict[Socket, int] = {}
        self._told: dict[int, deque[bytes]] = {}
        """Who may knock, and the words that it was told."""
        self._open: set[int] = set()
        """With whom there is a way."""
        self._reached: set[int] = set()
        """Who is ready for pieces."""
        self._next: dict[int, float] = {}
        """When a peer may be asked again."""

    def listen(self, host: str) -> None:
        """At a free port; `host` as in an address."""
        router = self._socket(zmq.ROUTER, host)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            self._port = router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError:
            router.close()  # no port is free: CURVE carries all
            return
        self._router = router
        self._poller.register(router, zmq.POLLIN)

    def reaches(self, peer: int) -> bool:
        """Whether pieces get through to one."""
        return peer in self._reached

    def ask(self, peer: int, connects: bool, now: float) -> None:
        """Begin to agree with one on a way; `connects`: it is this process that connects to it."""
        if now >= self._next.get(peer, 0.0) and (connects or self._port):
            self._next[peer] = now + _AGAIN
            if connects:
                self._say(peer, None)
            else:
                self._tell(peer)

    def hear(self, peer: int, told: Any, host: str, now: float) -> None:
        """One speaks of ways, as in the head of this file; `host`: where it listens, if this process connects to it."""
        if told is None and self._port:
            self._tell(peer)
        elif isinstance(told, list) and host and [type(part) for part in told] == [int, str]:
            if 0 < told[0] < 1 << 16 and told[1].isascii() and 0 < len(told[1]) < 100:
                self._knock(peer, host, told[0], told[1])
        elif told is True and peer in self._dealers:
            self._open.add(peer)
            self._say(peer, "ping")
        elif told is False:
            self._reached.discard(peer)
            self._next[peer] = now + _LOST
            self._give_up(peer)
        elif told == "ping":
            self._say(peer, "pong")
        elif told == "pong" and peer in self._open:
            self._reached.add(peer)
        elif told == "cut":
            self._inbox.cut(peer, now)

    def forget(self, peer: int) -> None:
        """Give up the way to one."""
        for some in (self._open, self._reached):
            some.discard(peer)
        self._next.pop(peer, None)
        self._forget_words(peer)
        self._disconnect(peer)

    def send(self, peer: int, payload: Part, ticket: bytes, announce: Callable[[], bool]) -> int:
        """Seal a tensor and hand its pieces over: how many bytes those are, 0 if there is no way any more.

        `announce` sends the message with the ticket: after the first piece, which shows that there is a way, and before
        the others, so that they are expected when they come.
        """
        (_, dealer), total = self._dealers.get(peer, (0, None)), 0
        target, name = (dealer, []) if dealer is not None else (self._router, [name_of(peer)])
        if target is None:
            return 0
        try:
            for piece in seal(payload, ticket):
                target.send_multipart([*name, piece], zmq.NOBLOCK, copy=False)
                if not total and not announce():
                    return 0
                total += len(piece)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._reached.discard(peer)
            if total:
                self._say(peer, "cut")
            self._give_up(peer)
        return total

    def owns(self, source: Any) -> bool:
        """Whether a socket is one of these."""
        return source is self._router or source in self._peers

    def take(self, source: Socket) -> int:
        """Read pieces from one of these sockets; how many bytes came."""
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
            elif not len(piece) and sender in self._told:
                self._forget_words(sender)
                self._open.add(sender)
                self._say(sender, True)
                self._say(sender, "ping")
        return total

    def close(self, linger: int) -> None:
        """`linger`: milliseconds for what has not left yet."""
        for _, dealer in self._dealers.values():
            dealer.close(linger=linger)
        if self._router is not None:
            self._router.close(linger=linger)
        self._dealers, self._peers, self._router = {}, {}, None

    def _tell(self, peer: int) -> None:
        word = secrets.token_hex(16)
        told = self._told.setdefault(peer, deque())
        told.append(word.encode())
        self._words.add(word.encode())
        if len(told) > _WORDS:
            self._words.discard(told.popleft())
        self._say(peer, [self._port, word])

    def _forget_words(self, peer: int) -> None:
        self._words.difference_update(self._told.pop(peer, ()))

    def _knock(self, peer: int, host: str, port: int, word: str) -> None:
        """At the door of one who listens. It may tell its port twice: what is on the way there stays on it."""
        known, dealer = self._dealers.get(peer, (0, None))
        if dealer is not None and known == port:
            try:
                dealer.send(b"", zmq.NOBLOCK)
                return
            except zmq.Again:
                pass  # its connection has ended, and with it its word
        self._disconnect(peer)
        dealer = self._socket(zmq.DEALER, host)
        dealer.setsockopt(zmq.ROUTING_ID, name_of(self._me))
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"shoal")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, word.encode())
        dealer.connect(f"tcp://{host}:{port}")
        self._dealers[peer], self._peers[dealer] = (port, dealer), peer
        self._poller.register(dealer, zmq.POLLIN)
        dealer.send(b"", zmq.NOBLOCK)

    def _give_up(self, peer: int) -> None:
        """Leave the way that this process has made to one; what is still to come on it will not."""
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
        made.setsockopt(zmq.SNDHWM, 0)  # what waits here waits for a message that the other way has taken
        made.setsockopt(zmq.RCVHWM, _PIECES)
        made.setsockopt(zmq.MAXMSGSIZE, 2 * PIECE)
        return made
