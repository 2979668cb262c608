"""Who serves which shard: a view, numbered by its epoch, and how shards are placed on servers.

Every message says in which epoch its sender acts. A server takes part in one epoch at a time and never in an earlier
one, so whoever was dropped from a view, and does not know it yet, can change nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

LEDGER = 0
"""The first shard is the ledger: who works on what."""
ROWS = "rows"
"""The kind of a shard of a table."""

_SLACK = 1.1
"""A server may hold this much more than an equal part of the bytes, to stay where the hash puts a shard."""


@dataclass(frozen=True)
class View:
    """One epoch: the chain of each shard, head first, and what everybody needs to know of the job."""

    epoch: int = 0
    chains: tuple[tuple[int, ...], ...] = ()
    """Server ids; empty until enough servers are there."""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """Where each server listens."""
    kinds: tuple[str, ...] = ()
    """What each shard is, as the workers asked for it."""
    replicas: int = 1
    failed: str = ""
    """A sentence if the job cannot go on: a shard is lost."""
    places: int = 0
    """The number of servers that the job asks for."""
    slots: Mapping[int, int] = field(default_factory=dict)
    """Which place among the servers each of them has taken: a new one takes the place of one that is gone."""
    born: int = 0
    """The epoch in which the job began. Shards of those who are there since then began with nothing."""
    since: Mapping[int, int] = field(default_factory=dict)
    """The epoch in which each server came. One that was left out meanwhile has come anew, and knows nothing."""
    newcomers: tuple[tuple[int, ...], ...] = ()
    """The servers to be added to each chain, one after the other: the first is sent the state of the tail, and is no
    member until it has caught up. Empty: nobody anywhere."""

    def head(self, shard: int) -> int:
        return self.chains[shard][0]

    def tail(self, shard: int) -> int:
        return self.chains[shard][-1]

    def newcomer(self, shard: int) -> int | None:
        """The server that is catching up with a chain; None if there is none."""
        return self.newcomers[shard][0] if self.newcomers and self.newcomers[shard] else None

    def to_meta(self) -> list[object]:
        """As a plain value."""
        return [
            self.epoch,
            [list(chain) for chain in self.chains],
            [[server, address] for server, address in self.addresses.items()],
            list(self.kinds),
            self.replicas,
            self.failed,
            self.places,
            [[server, slot] for server, slot in self.slots.items()],
            self.born,
            [[server, epoch] for server, epoch in self.since.items()],
            [list(servers) for servers in self.newcomers],
        ]

    @staticmethod
    def from_meta(meta: Any) -> View:
        """Read back what `to_meta` gave; ValueError if it is not such a value.

        >>> view = View(3, ((7,),), {7: "tcp://[::1]:1"}, ("ledger",), 2, "", 2, {7: 0, 8: 1}, 1, {7: 1}, ((8,),))
        >>> View.from_meta(view.to_meta()) == view
        True
        """
        try:
            epoch, chains, addresses, kinds, replicas, failed, places, slots, born, since, newcomers = meta
            return View(
                int(epoch),
                tuple(tuple(int(server) for server in chain) for chain in chains),
                {int(server): str(address) for server, address in addresses},
                tuple(str(kind) for kind in kinds),
                int(replicas),
                str(failed),
                int(places),
                {int(server): int(slot) for server, slot in slots},
                int(born),
                {int(server): int(epoch) for server, epoch in since},
                tuple(tuple(int(server) for server in servers) for servers in newcomers),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a view: {error}") from None


@dataclass(frozen=True, slots=True)
class ChainPosition:
    """Where a server stands in the chain of a shard, in one view."""

    is_member: bool = False
    """Whether it is in the chain; if not, it is the newcomer."""
    is_head: bool = False
    is_tail: bool = False
    before: int | None = None
    """The server that it gets operations from."""
    next: int | None = None
    """The server that it forwards operations to: for the tail, the newcomer."""

    @staticmethod
    def of(me: int, shard: int, view: View) -> ChainPosition:
        """The position of server `me`, which is in the chain or the newcomer that joins it.

        >>> view = View(1, ((7, 8),), newcomers=((9,),))
        >>> ChainPosition.of(7, 0, view)
        ChainPosition(is_member=True, is_head=True, is_tail=False, before=None, next=8)
        >>> ChainPosition.of(8, 0, view)
        ChainPosition(is_member=True, is_head=False, is_tail=True, before=7, next=9)
        >>> ChainPosition.of(9, 0, view)
        ChainPosition(is_member=False, is_head=False, is_tail=False, before=8, next=None)
        """
        line = (*view.chains[shard], *view.newcomers[shard][:1]) if view.newcomers else view.chains[shard]
        place = line.index(me)
        members = len(view.chains[shard])
        return ChainPosition(
            place < members,
            place == 0,
            place == members - 1,
            line[place - 1] if place else None,
            line[place + 1] if place + 1 < len(line) else None,
        )


def place(
    sizes: Sequence[int], slots: Sequence[int], replicas: int, kinds: Sequence[str] = ()
) -> list[list[int]]:
    """The chain of each shard of so many bytes, as places of servers, head first.

    Each shard draws a number for every place and takes the highest (rendezvous hashing), unless a place has its part
    of the bytes already: then the next. So an added place takes shards from all others and little else moves. Shards
    of rows are spread by themselves: nobody knows how large they get, and what is said of it would hide all else.

    >>> place([10, 10, 10, 10], [0, 1], replicas=2)
    [[0, 1], [1, 0], [0, 1], [1, 0]]
    >>> place([10, 10, 10**9, 10**9], [0, 1], replicas=1, kinds=["dense", "dense", "rows", "rows"])
    [[0], [1], [0], [1]]
    """
    if replicas > len(slots):
        raise ValueError(f"{replicas} replicas need as many servers; there are {len(slots)}")
    rows = [bool(kinds) and kinds[shard] == ROWS for shard in range(len(sizes))]
    chains: list[list[int]] = [[] for _ in sizes]
    for some in (True, False):
        shards = [shard for shard, is_rows in enumerate(rows) if is_rows == some]
        _place_some(chains, shards, sizes, slots, replicas)
    return chains


def _place_some(
    chains: list[list[int]], shards: Sequence[int], sizes: Sequence[int], slots: Sequence[int], replicas: int
) -> None:
    held = dict.fromkeys(slots, 0)
    heads = dict.fromkeys(slots, 0)
    room = _SLACK * sum(sizes[shard] for shard in shards) / len(slots)
    # Largest first, as in bin packing: small ones then even out what is left.
    for shard in sorted(shards, key=lambda s: (-sizes[s], s)):
        drawn = sorted(slots, key=lambda slot: _draw(shard, slot), reverse=True)
        size = sizes[shard]
        # The head works most: it receives what workers send. So heads are spread first, then the copies.
        fits = [slot for slot in drawn if heads[slot] + size <= room]
        head = fits[0] if fits else min(drawn, key=lambda slot: heads[slot])
        rest = [slot for slot in drawn if slot != head]
        rest.sort(key=lambda slot: held[slot] + size > room * replicas)  # stable: the order drawn within each
        chains[shard] = [head, *rest[: replicas - 1]]
        heads[head] += size
        for slot in chains[shard]:
            held[slot] += size


def _draw(shard: int, slot: int) -> int:
    # The same number in every process and version, unlike `hash`.
    return int(xxhash.xxh3_64_intdigest(f"shard {shard} slot {slot}".encode()))
