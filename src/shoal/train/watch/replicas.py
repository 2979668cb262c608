"""Replicas hold the same numbers, bit for bit; memory that went wrong without an error is found by comparing hashes.

Every rank hashes its parameters and the optimizer state that all replicas have. One number a rank tells whether all are
equal; only if not, hashes of single tensors are compared, and what a majority holds replaces the others'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from shoal.errors import ConfigError, ReplicasDiffer
from shoal.exchange.contract import Exchange
from shoal.world.mesh import Mesh

_EXACT_BITS = (1 << 52) - 1
"""Hashes travel as float64, which holds so many bits of a whole number."""


@dataclass(frozen=True)
class Difference:
    """Replicas that were not equal."""

    ranks: tuple[int, ...]
    """Whose numbers were replaced, by their number among all workers."""
    name: str
    """The first parameter, or state of it."""
    count: int
    """How many tensors."""


def check_comparable(every: int, plan: str, exchange: type[Exchange] | Exchange) -> None:
    """Refuse what has no replicas that could be compared."""
    if every < 1:
        raise ConfigError(f"check_replicas={every}; give a number of steps, such as 100.")
    why = ""
    if exchange.uses_servers:
        why = "workers hold copies of what servers have, each of another moment"
    elif exchange.updates_alone:
        why = "workers hold different parameters between two averages"
    elif exchange.cuts_parameters:
        why = "each parameter is cut over the workers, and nobody holds it twice"
    elif exchange.one_copy:
        why = "the workers of a host hold one copy between them"
    if why:
        raise ConfigError(
            f"check_replicas={every} under {plan}: {why}; leave it out, or use ddp, zero1 or zero2."
        )


class Replicas:
    """Compares the replicas of one model part; the same on every rank."""

    def __init__(self, exchange: Exchange, mesh: Mesh) -> None:
        self._exchange = exchange
        self._mesh = mesh
        self._common: list[str] | None = None

    def compare(self, step: int) -> Difference | None:
        """None if all are equal. Heals what a majority has; raises where there is none. Collective."""
        tensors = dict(named_tensors(self._exchange))
        world, mesh = self._mesh.world, self._mesh
        if self._common is None or not set(self._common) <= set(tensors):
            lists = mesh.data.gather_values(sorted(tensors))
            self._common = [name for name in sorted(tensors) if all(name in names for names in lists)]
        hashes = {name: hash_of(tensors[name]) for name in self._common}
        digest = xxhash.xxh3_64_intdigest(repr(sorted(hashes.items())).encode()) & _EXACT_BITS
        digests = world.gather_numbers([float(digest)])[:, 0].tolist()
        parts = [mesh.place_of(rank)[1:] for rank in range(world.size)]
        torn = {
            part for part in parts if len({d for d, p in zip(digests, parts, strict=True) if p == part}) > 1
        }
        if not torn:
            return None
        # Everybody knows by now: ranks of parts that are equal take part in what comes, with nothing to say.
        mine = self._heal(tensors, hashes, self._common) if parts[world.rank] in torn else None
        rows = [row for row in world.gather_values(mine) if row is not None]
        hopeless = next((row for row in rows if not row["ranks"]), None)
        if hopeless is not None:
            raise ReplicasDiffer(
                f"after step {step} ranks {', '.join(map(str, hopeless['all']))} hold different values of "
                f"{hopeless['name']} (the first of {hopeless['count']} tensors), and no value has a majority; start "
                "again from the newest checkpoint, and look at the memory of these hosts (`dmesg`, ECC)."
            )
        ranks = sorted({rank for row in rows for rank in row["ranks"]})
        return Difference(tuple(ranks), str(rows[0]["name"]), max(int(row["count"]) for row in rows))

    def _heal(
        self, tensors: dict[str, torch.Tensor], hashes: dict[str, int], names: Sequence[str]
    ) -> dict[str, object]:
        """Within the ranks of one model part. Collective among them."""
        data = self._mesh.data
        table = data.gather_values([hashes[name] for name in names])
        bad = [place for place in range(len(names)) if len({row[place] for row in table}) > 1]
        odd: set[int] = set()
        everybody = [data.members[rank] for rank in range(data.size)]
        for place in bad:
            values = [row[place] for row in table]
            usual, count = Counter(values).most_common(1)[0]
            if 2 * count <= data.size:
                return {"ranks": [], "all": everybody, "name": names[place], "count": len(bad)}
            source = values.index(usual)
            tensor = tensors[names[place]]
            sent = tensor.contiguous()
            data.broadcast(sent, source).wait()
            if sent is not tensor:
                tensor.copy_(sent)
            odd.update(data.members[rank] for rank, value in enumerate(values) if value != usual)
        return {"ranks": sorted(odd), "all": everybody, "name": names[bad[0]], "count": len(bad)}


def named_tensors(exchange: Exchange) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and optimizer state that lie on this rank, under names that tell their place in the whole."""
    for shard in exchange.parameter_shards():
        yield _name(shard.name, shard.start, shard.tensor), shard.tensor
    state = exchange.optimizer.state
    for shard in exchange.optimizer_shards():
        for key, value in state.get(shard.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                name = f"{key} of {shard.name}" if value.numel() == 1 else f"{key} of "
                yield name if value.numel() == 1 else name + _name(shard.name, shard.start, value), value


def _name(name: str, start: int, tensor: torch.Tensor) -> str:
    return f"{name}[{start}:{start + tensor.numel()}]" if start else name


def hash_of(tensor: torch.Tensor) -> int:
    """Of the bytes.

    >>> a, b = torch.ones(3), torch.ones(3)
    >>> hash_of(a) == hash_of(b), hash_of(a) == hash_of(b * -1)
    (True, False)
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = (flat.cpu() if flat.device.type != "cpu" else flat).numpy().data
    return xxhash.xxh3_64_intdigest(data) & _EXACT_BITS
