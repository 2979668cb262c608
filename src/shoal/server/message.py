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
from dataclasses import dataclass
from typing import Any

import torch


class Kind(enum.IntEnum):
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
    """One message. What a field means beyond its name, its kind says."""

    kind: Kind
    epoch: int = 0
    """The number of the view that the sender acts in."""
    shard: int = 0
    client: int = 0
    """Who asked first: not the server that passes it on."""
    seq: int = 0
    """The client's own number of the request."""
    place: int = 0
    """Of an operation in its shard's log; the first is 1."""
    clock: int = 0
    """The training step that it is about."""
    meta: Any = None
    """A plain value: numbers, texts, lists, and dicts with text keys."""
    tensor: torch.Tensor | None = None
    """Flat, on the CPU."""
    where: Where | None = None
    """Instead of bytes: where they are. The receiver's transport fills `tensor` from it, so both may be set."""
    codec: int = 0
    """Not 0: the tensor is not numbers, but what a compressor has made of them."""
