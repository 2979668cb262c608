"""Which workers share a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.errors import ConfigError


class Hosted(Protocol):
    """Workers of which it is known where they are: a `World`, which cannot be imported here."""

    hosts: tuple[str, ...]


def group_ranks(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, given the host of each rank; hosts in the order of their first ranks.

    >>> group_ranks(["b", "a", "b"])
    [[0, 2], [1]]
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def ranks_by_host(world: Hosted, what: str) -> list[list[int]]:
    """The ranks of each host; `what` needs as many on each."""
    found = group_ranks(world.hosts)
    counts = sorted({len(ranks) for ranks in found})
    if len(counts) > 1:
        raise ConfigError(
            f"{what} needs as many workers on every host, but hosts have {counts[0]} to {counts[-1]}; "
            "use equal --workers, or ddp."
        )
    return found
