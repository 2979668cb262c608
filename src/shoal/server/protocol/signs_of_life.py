"""What processes of a job say of themselves in ALIVE and READY messages, and what the coordinator answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

ServiceMessage: TypeAlias = "tuple[Sequence[int], Sequence[str], int, int, float]"
"""What a job asks of its servers: bytes and kind of each shard, servers, copies, patience in seconds."""


class ServerSign(TypedDict):
    """A server says all that a new coordinator would have to know, every time."""

    role: Literal["server"]
    slot: int
    address: str
    whole: list[int]
    """The shards whose state it has."""
    caught_up: list[int]
    """The shards that it is the tail of, and whose newcomer has nearly all that it has."""
    view: list[object]
    promised: int
    """It takes no view of an earlier epoch than this."""
    at: float
    """When it said so, by its own clock: the coordinator sends it back, and the server measures its lease with it."""
    load: dict[str, float]


class WorkerSign(TypedDict):
    """A worker says what it is doing."""

    role: Literal["worker"]
    rank: int
    held: float
    """Seconds for which it has been working on its part."""
    terms: ServiceMessage
    address: str | None
    """Where it lends values to other workers; None: nowhere."""


class Confirmation(TypedDict):
    """The coordinator has heard a server."""

    base: int
    """Where the epochs of this coordinator begin."""
    at: float | None
    """The server's own `at`; None where the server has not promised yet, so that its lease does not begin."""


class ServersNews(TypedDict, total=False):
    """The coordinator tells workers how the servers are."""

    whole: bool
    """Whether every shard is whole on as many servers as it should be."""
    busy: list[float]
    """The share of its time for which each server computes."""
    servers: int
    """How many servers the coordinator has."""
    epoch: int
