"""First values, which workers hand on to each other: servers and slow wires need not carry them to everybody.

Whoever gave the shards their values is the root of a tree. The first worker of each host gets them from another host's,
and serves two hosts more, shard by shard as they come; the others of a host read its memory. Nobody depends on it: who
is not answered, or comes when nothing is lent any more, asks the servers.

    worker -> coordinator  ASK source    worker -> worker  ASK values    worker <- worker  REPLY: numbers, wait, or gone
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import replace

import torch

from shoal.server.dense.shard_values import Values
from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.protocol.session import OK
from shoal.world.shm.memory import put

KEPT_SECONDS = 5.0
"""How long after the last question values are kept for others."""
_HOST = re.compile(r"tcp://\[?([^\]]+?)\]?:([0-9]+)")


def own_address(coordinator: str) -> str | None:
    """Where other hosts reach this one, on the way to the coordinator; None if that way does not leave this host."""
    found = _HOST.fullmatch(coordinator)
    if found is None:
        return None
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(found[1], found[2], type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as line:
            # The route to the coordinator tells which of this host's addresses other hosts reach.
            line.connect(there)  # sends nothing
            mine = ipaddress.ip_address(line.getsockname()[0].partition("%")[0])
    except (OSError, ValueError):
        return None
    if mine.is_loopback:
        return None
    return f"tcp://[{mine}]:*" if mine.version == 6 else f"tcp://{mine}:*"


class Lent:
    """What one worker has for others: nothing yet, values for a while, and then nothing any more.

    Used by two threads, under the lock of their link.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._values: dict[int, Values] = {}
        self.begun = False
        """Whether this worker is getting its own values."""
        self._step = -1
        self.over = False
        self._asked = 0.0

    def add(self, step: int, shard: int, values: torch.Tensor, now: float) -> None:
        """Keep a copy of values of a shard that `step` begins with."""
        # A copy: the first update changes the worker's own values, while others may still be reading.
        kept = Values(values.numel(), values.dtype)
        put(kept.tensor, values)
        self._step = step
        self._asked = now
        self._values[shard] = kept

    def end(self) -> None:
        """There is nothing to be had here, now or later."""
        self.over = True
        values = self._values
        self._values = {}
        for kept in values.values():
            kept.close()

    def on_time(self, now: float) -> None:
        """Called often."""
        if self._values and now - self._asked > KEPT_SECONDS:
            self.end()

    def answer(self, question: Message, now: float) -> Message:
        """What a worker that asks for a shard's values gets."""
        self._asked = now
        reply = Message(MessageKind.REPLY, question.epoch, question.shard, question.client, question.seq)
        name, args = question.meta
        if args["of"] != self._me:
            return replace(reply, meta=[OK, {}])  # another process had this address before
        kept = self._values.get(question.shard)
        if kept is None:
            return replace(reply, meta=[OK, {"wait": not self.over, "begun": self.begun}])
        answer = replace(reply, meta=[OK, {"step": self._step}])
        return replace(answer, tensor=kept.tensor, where=kept.where) if name == "values" else answer
