"""By a hash of a key, such that a new part takes keys from all others and nothing else moves.

When to use: as `hash`, where the number of workers changes: from N to N + 1 parts about 1/(N+1) of the keys move, all
of them to the new part. `rendezvous` (Thaler, Ravishankar, *Using Name-Based Mappings to Increase Hit Rates*, 1998)
lets every part draw a number for the key and gives it to the highest. `ring` (Karger et al., *Consistent Hashing and
Random Trees*, 1997) puts points of every part on a circle and gives a key to the next point: faster with very many
parts, a little less even, and a new part with a larger share than all others moves more than it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.partition.base import OWN, Keys, Partition
from shoal.partition.cuts import Ids, Weights, hand_out
from shoal.partition.hashes import Hashes, hash_keys, mix, to_unit

KINDS = ("rendezvous", "ring")

_POINTS = 4096
"""Of the part with the largest weight. A part's share of the ring is then off by some percent of itself at most."""


@dataclass(frozen=True)
class Consistent(Partition):
    """As hash, but a new part moves only the keys that it takes."""

    summary: ClassVar[str] = "as hash, but a new part moves only the keys that it takes"
    counted: ClassVar[bool] = False
    key: str = OWN
    kind: str = "rendezvous"
    shares: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ConfigError(f"consistent: kind={self.kind}; it is {' or '.join(KINDS)}.")

    @property
    def keyed_by(self) -> str:
        return self.key

    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        del seed
        hashes = hash_keys(keys)
        owners = _highest(hashes, weights) if self.kind == "rendezvous" else _next_on_ring(hashes, weights)
        return hand_out(ids, owners, len(weights))


def _highest(hashes: Hashes, weights: Weights) -> npt.NDArray[np.intp]:
    """The part whose draw for the key is highest. -weight/ln(u) of a uniform u wins in proportion to the weight."""
    best = np.full(len(hashes), -np.inf)
    owners = np.zeros(len(hashes), dtype=np.intp)
    for part, (own, weight) in enumerate(zip(_of_parts(len(weights)), weights, strict=True)):
        drawn = -weight / np.log(to_unit(mix(hashes ^ own)))
        higher = drawn > best  # not for a tie: the earlier part keeps its key when another comes
        owners[higher] = part
        best[higher] = drawn[higher]
    return owners


def _next_on_ring(hashes: Hashes, weights: Weights) -> npt.NDArray[np.intp]:
    places, owners = _ring(tuple((weights / weights.max()).tolist()))
    return owners[np.searchsorted(places, hashes) % len(places)]  # after the last point comes the first


@lru_cache(maxsize=4)
def _ring(weights: tuple[float, ...]) -> tuple[Hashes, npt.NDArray[np.intp]]:
    """Where the points are, and whose they are. A part's points depend on its number and weight alone."""
    counts = [max(1, round(_POINTS * weight)) for weight in weights]
    own = _of_parts(len(weights))
    points = [mix(mix(np.arange(n, dtype=np.uint64)) ^ own[part]) for part, n in enumerate(counts)]
    places = np.concatenate(points)
    order = np.argsort(places, kind="stable")
    return places[order], np.repeat(np.arange(len(counts)), counts)[order]


def _of_parts(count: int) -> Hashes:
    """A hash of each part's number, apart from those of keys."""
    return mix(mix(np.arange(count, dtype=np.uint64)) + np.uint64(1))
