"""Between a process's sockets and its handler: memory instead of bytes where two processes share a host.

A message may say where its numbers are (`Where`). To a process of the same host only that is sent, and the receiver
looks at the memory itself. If it cannot, because the owner of the memory has ended, it says UNSEEN, and gets bytes.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch
import xxhash

from shoal.errors import ConfigError
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind
from shoal.server.protocol.session import MALFORMED
from shoal.server.protocol.view import View
from shoal.server.transport.slabs import Opened, Slab
from shoal.server.transport.sockets import Wire
from shoal.world.shm.memory import SharedMemoryUnavailable, copy, host_key

_HOST_BITS = 24
_OWN_BITS = 39
_MARK = 64
"""Bytes before a snapshot, for its number."""


def new_id(host: str = "") -> int:
    """A number for a process of a job, by which others also know on which host it is."""
    where = xxhash.xxh3_64_intdigest(host_key(host).encode()) >> (64 - _HOST_BITS)
    return (
        where << _OWN_BITS | secrets.randbits(_OWN_BITS)
    ) + 2**16  # small numbers have a meaning of their own


def host_of(who: int) -> int:
    """The number of a process's host."""
    return (who - 2**16) >> _OWN_BITS


def same_host(one: int, other: int) -> bool:
    """Whether two processes can share memory."""
    return host_of(one) == host_of(other)


class ShmTransport:
    """One process's transport."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.opened = Opened()
        self._addresses: dict[int, str] = {}
        self._epoch = 0
        self._blind: set[tuple[int, str]] = set()
        """(peer, path) of memory that the peer could not open: it gets bytes from then on."""
        self._snapshots: dict[tuple[int, int], Slab] = {}
        """Peer and shard -> a snapshot that the peer has not confirmed yet."""
        self._sightless: set[int] = set()
        """Peers that could not open a snapshot's memory: they get bytes from then on."""
        self.shared_bytes = 0
        """Bytes that peers read in shared memory instead of from the wire."""

    def know(self, peer: int, address: str) -> None:
        """Where a process listens."""
        far = peer != COORDINATOR and not same_host(self.wire.me, peer)  # tensors will go there, as bytes
        self.wire.connect(peer, address, ahead=far)
        self._addresses[peer] = address

    def send(self, peer: int, message: Message) -> None:
        """Send, or not: nothing is promised."""
        # A snapshot is made into shared memory only here, when it is sent; replies and gradients already lie in a slab.
        near = same_host(self.wire.me, peer) and peer not in self._sightless
        if message.kind == MessageKind.SNAPSHOT and message.tensor is not None and near:
            message = self._shared(peer, message)
        if message.where is not None:
            if same_host(self.wire.me, peer) and (peer, message.where.path) not in self._blind:
                if message.tensor is not None:
                    self.shared_bytes += message.tensor.nbytes
                message = replace(message, tensor=None)
            else:
                message = replace(message, where=None)
        if (
            message.kind == MessageKind.REPLY
            and message.tensor is not None
            and not self.wire.seals(peer, message)
        ):
            # The socket sends later, and by then the values may have changed.
            message = replace(message, tensor=message.tensor.clone())
        self.wire.send(peer, message)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """What has come, with its tensors."""
        found = []
        for source, message in self.wire.receive(timeout):
            if message.kind == MessageKind.UNSEEN:
                self._blind.add((source, str(message.meta)))
                if (source, message.shard) in self._snapshots:
                    self._sightless.add(source)
            elif message.kind == MessageKind.COMMIT:
                self._snapshots.pop((source, message.shard), None)
            elif message.kind == MessageKind.VIEW:
                try:
                    self._meet(View.from_meta(message.meta))
                except (*MALFORMED, ConfigError):
                    continue
            if message.where is not None:
                is_snapshot = message.kind == MessageKind.SNAPSHOT
                # May be None: between send and receive the owner can end, or its container may hide /proc from this
                # one.
                tensor = self._snapshot(message) if is_snapshot else self.opened.tensor(message.where)
                if tensor is None:
                    path = message.where.path
                    unseen = replace(message, kind=MessageKind.UNSEEN, where=None, meta=path)
                    self.wire.send(source, unseen)
                    if (
                        message.kind == MessageKind.REPLY
                    ):  # whoever asked has to ask again, now that it is known
                        found.append((source, unseen))
                    continue
                message = replace(message, tensor=tensor)
            found.append((source, message))
        return found

    def _shared(self, peer: int, message: Message) -> Message:
        """A snapshot as memory of its own; as it is where there is none.

        A path may come to name another snapshot before its message is read. So both say a number of their own.
        """
        assert message.tensor is not None
        count = message.tensor.numel()
        try:
            slab = Slab(_MARK + count)
        except SharedMemoryUnavailable:
            return message
        mark = secrets.randbits(62)
        copy(slab.tensor(torch.uint8, _MARK, count), message.tensor)
        slab.tensor(torch.int64, 0, 1).fill_(mark)
        # Kept until the peer confirms: closing the slab before it has mapped the memory would leave it with nothing.
        # One per peer and shard, so a snapshot that is sent again frees the one before.
        self._snapshots[peer, message.shard] = slab
        where = slab.where(torch.uint8, _MARK, count)
        return replace(message, tensor=slab.tensor(torch.uint8, _MARK, count), where=where, clock=mark)

    def _snapshot(self, message: Message) -> torch.Tensor | None:
        """The numbers of a snapshot, if they are those that its message speaks of."""
        assert message.where is not None
        mark = self.opened.tensor(replace(message.where, offset=0, count=1, dtype=torch.int64))
        tensor = self.opened.tensor(message.where)
        self.opened.forget(message.where.path)
        return tensor if mark is not None and int(mark) == message.clock else None

    def _meet(self, view: View) -> None:
        if view.epoch <= self._epoch:
            return  # an old view that comes late must not cut off those who have come since
        for peer, address in view.addresses.items():
            if peer != self.wire.me and self._addresses.get(peer) != address:
                self.know(peer, address)
        self._epoch = view.epoch
        for gone in [key for key in self._snapshots if key[0] not in view.addresses]:
            del self._snapshots[gone]
        # Numbers below 2**16 are fixed parts such as the coordinator, which no view lists.
        for peer in [p for p in self._addresses if p not in view.addresses and p >= 2**16]:
            del self._addresses[peer]
            self.wire.disconnect(peer)

    def close(self, linger: float = 0.0) -> None:
        self.wire.close(linger)
        self.opened.close()
