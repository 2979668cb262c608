"""Which workers share a host."""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.world.world import World


def ranks_by_host(world: World, what: str) -> list[list[int]]:
    """The ranks of each host; `what` needs as many on each."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        by_host.setdefault(host, []).append(rank)
    counts = sorted({len(ranks) for ranks in by_host.values()})
    if len(counts) > 1:
        raise ConfigError(
            f"{what} needs as many workers on every host, but hosts have {counts[0]} to {counts[-1]}; "
            "use equal --workers, or ddp."
        )
    return list(by_host.values())
