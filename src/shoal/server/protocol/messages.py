"""What processes of a parameter server say to each other. Values only: nothing here sends or receives.

client            CALL to the head of a shard's chain: change something. ASK its tail: read something.
server            REPLY. FORWARD an operation to the next in the chain, COMMIT back what the last one holds,
                  SNAPSHOT to one that joins. UNSEEN: memory that a message pointed to cannot be opened here.
coordinator       VIEW to everybody: who serves which shard. Servers and workers send it ALIVE;
                  a server says READY when it holds a shard whole.
transport         BULK between two processes: where sealed tensors go (bulk.py). Nobody above sees it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | None"
"""What msgpack carries: values without classes, so that reading them runs no code."""


class MessageKind(enum.IntEnum):
    """What a message is."""

    CALL = 1
    ASK = 2
    REPLY = 3
    FORWARD = 4
    COMMIT = 5
    SNAPSHOT = 6
    UNSEEN = 7
    ALIVE = 9
    VIEW = 10
    READY = 11
    BYE = 12
    BULK = 13


@dataclass(frozen=True, slots=True)
class Where:
    """A flat tensor in memory that processes of one host share: `path` is where the kernel shows its file."""

    path: str
    offset: int
    """In bytes."""
    count: int
    """In elements."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Which fields are used depends on its kind."""

    kind: MessageKind
    epoch: int = 0
    """The number of the view that the sender acts in."""
    shard: int = 0
    client: int = 0
    """The client that sent the request, not the server that forwards it."""
    seq: int = 0
    """The client's sequence number of the request; a repeated request has the same one."""
    place: int = 0
    """Index of the operation in its shard's log; the first is 1."""
    clock: int = 0
    """The training step that it is about."""
    meta: Any = None
    """A `Plain` value. `Any`, because each kind has its own form, which whoever handles that kind checks."""
    tensor: torch.Tensor | None = None
    """Flat, on the CPU."""
    where: Where | None = None
    """Shared memory that holds the tensor, instead of its bytes. The receiver's transport sets `tensor` from it."""
    codec: int = 0
    """Not 0: the tensor is the payload of a compressor, to be decoded."""


Send = Callable[[int, Message], None]

COORDINATOR = 1
"""Node number of the coordinator. A process that takes over as coordinator takes over this number."""

BEAT = 0.1
"""Seconds between two heartbeats (ALIVE)."""
