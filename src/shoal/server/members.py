"""What the coordinator knows of those who take part."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.server.view import LEDGER, View


@dataclass
class Server:
    """What is known of a server."""

    address: str
    heard: float
    slot: int
    whole: set[int] = field(default_factory=set)
    epoch: int = 0
    load: dict[str, float] = field(default_factory=dict)


@dataclass
class Worker:
    """What is known of a worker."""

    heard: float
    rank: int
    held: float = 0.0
    """How long it has been working on one part, in seconds."""
    lost: bool = False


@dataclass(frozen=True)
class Terms:
    """What a job asks of its servers; the same from every worker."""

    sizes: tuple[int, ...]
    """Bytes of each shard, the ledger included."""
    kinds: tuple[str, ...]
    servers: int
    replicas: int
    patience: float
    """Seconds that a worker may hold a part before others get it."""


def lost_sentence(shard: int, view: View) -> str:
    """Why a job cannot go on."""
    what = "the ledger" if shard == LEDGER else f"shard {shard}"
    return (
        f"all servers that held {what} have ended, and with them its state ({view.replicas} "
        f"{'copy' if view.replicas == 1 else 'copies'} of each shard); start again from the last checkpoint, and use "
        f"replicas={view.replicas + 1} to survive this."
    )
