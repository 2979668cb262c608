"""What the coordinator knows of those who take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.server.view import LEDGER, View


@dataclass
class Server:
    """What is known of a server."""

    address: str
    heard: float
    slot: int
    whole: set[int] = field(default_factory=set)
    epoch: int = 0
    gone: bool = False
    """Whether somebody has seen it end."""
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
class ServiceTerms:
    """What a job asks of its servers; the same from every worker."""

    sizes: tuple[int, ...]
    """Bytes of each shard, the ledger included."""
    kinds: tuple[str, ...]
    servers: int
    replicas: int
    patience: float
    """Seconds that a worker may hold a part before others get it."""

    @staticmethod
    def of(told: Sequence[Any]) -> ServiceTerms:
        """As a worker says them: in this order, as plain values."""
        sizes, kinds, servers, replicas, patience = told
        return ServiceTerms(tuple(sizes), tuple(kinds), int(servers), int(replicas), float(patience))


def all_whole(view: View, known: Mapping[int, Server]) -> bool:
    """Whether every shard is whole on as many servers as it should be, by what they said in this view."""
    return bool(view.chains) and all(
        len(chain) >= view.replicas
        and all(s in known and known[s].epoch == view.epoch and shard in known[s].whole for s in chain)
        for shard, chain in enumerate(view.chains)
    )


def can_do_without(who: int, view: View, known: Mapping[int, Server], since: float) -> bool:
    """Whether all that a silent server holds is whole on others that were heard `since`: silence may lose nothing."""
    others = {s: server for s, server in known.items() if s != who and server.heard >= since}
    return all(
        any(s in others and shard in others[s].whole for s in chain)
        for shard, chain in enumerate(view.chains)
        if who in chain
    )


def heads_without_state(view: View, known: Mapping[int, Server]) -> list[int]:
    """Heads never get a state that they have not: they may have been left out by a view that is forgotten."""
    return [
        chain[0]
        for shard, chain in enumerate(view.chains)
        if chain[0] in known and known[chain[0]].epoch == view.epoch and shard not in known[chain[0]].whole
    ]


def lost_sentence(shard: int, view: View) -> str:
    """Why a job cannot go on."""
    what = "the ledger" if shard == LEDGER else f"shard {shard}"
    return (
        f"all servers that held {what} have ended, and with them its state ({view.replicas} "
        f"{'copy' if view.replicas == 1 else 'copies'} of each shard); start again from the last checkpoint, and use "
        f"replicas={view.replicas + 1} to survive this."
    )
