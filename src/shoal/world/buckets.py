"""Flat buckets: where every parameter and its gradient lies in a few long vectors. Pure arithmetic.

A bucket is one contiguous vector that holds several parameters one after the other. It is cut into as many
equal slices as there are owners, so one reduce-scatter or all-gather moves it whole. A parameter may cross a
slice border; the part of it that lies in one slice is a piece.

Every parameter starts at, and every slice ends at, a multiple of ALIGN elements. Element-wise kernels treat
the last few elements of a vector in another way than its body; with these borders an element is in the body
or in the tail no matter how its parameter was cut, so all exchanges round alike and agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGN = 64


@dataclass(frozen=True)
class Place:
    """One parameter in a bucket: elements [start, start + numel)."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat vector; `size` elements, a multiple of the number of slices."""

    index: int
    dtype: torch.dtype
    places: tuple[Place, ...]
    size: int
    share: float = 1.0
    """How much of its parameters counts on this worker for the norm of the whole model."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in a range of its bucket."""

    name: str
    bucket: int
    start: int
    """First element, counted in the bucket."""
    numel: int
    offset: int
    """First element, counted in the flattened parameter."""


def lay_out(
    parameters: Sequence[tuple[str, int, torch.dtype]],
    slices: int,
    capacity: int,
    shares: Mapping[str, float] | None = None,
) -> tuple[Bucket, ...]:
    """Pack (name, numel, dtype), in the order given, into buckets of at most `capacity` bytes each.

    A parameter larger than the capacity gets a bucket of its own. Each dtype has its own buckets, and so has each
    share (1 where none is given), by which a bucket counts in the norm.

    >>> buckets = lay_out([("b", 3, torch.float32), ("a", 100, torch.float32)], slices=2, capacity=4096)
    >>> [(p.name, p.start) for p in buckets[0].places], buckets[0].size
    ([('b', 0), ('a', 64)], 256)
    """
    buckets: list[Bucket] = []
    kinds = {name: (dtype, (shares or {}).get(name, 1.0)) for name, _, dtype in parameters}
    for dtype, share in dict.fromkeys(kinds.values()):
        places: list[Place] = []
        end = 0
        for name, numel, _ in parameters:
            if kinds[name] != (dtype, share):
                continue
            if places and (end + numel) * dtype.itemsize > capacity:
                buckets.append(_close(len(buckets), dtype, places, end, slices, share))
                places = []
                end = 0
            places.append(Place(name, end, numel))
            # 64 elements: each parameter begins at a cache line, and vector instructions find aligned data.
            end = _round_up(end + numel, ALIGN)
        buckets.append(_close(len(buckets), dtype, places, end, slices, share))
    return tuple(buckets)


def slice_of(bucket: Bucket, slices: int, index: int) -> tuple[int, int]:
    """First element and end of slice `index` of a bucket."""
    width = bucket.size // slices
    return index * width, (index + 1) * width


def pieces_of(bucket: Bucket, start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of the bucket's parameters that lie in [start, stop)."""
    found = []
    for place in bucket.places:
        low, high = max(place.start, start), min(place.start + place.numel, stop)
        if low < high:
            found.append(Piece(place.name, bucket.index, low, high - low, low - place.start))
    return tuple(found)


def gaps_of(pieces: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The ranges of a vector that no piece, given by start and length, covers.

    >>> gaps_of([(0, 3), (4, 2)], 8)
    [(3, 4), (6, 8)]
    """
    found = []
    end = 0
    for start, numel in sorted([*pieces, (size, 0)]):
        if start > end:
            found.append((end, start))
        end = max(end, start + numel)
    return found


def _close(
    index: int, dtype: torch.dtype, places: list[Place], end: int, slices: int, share: float
) -> Bucket:
    # A multiple of the slices, so that reduce-scatter gives equal parts; padding is zero and never read.
    return Bucket(index, dtype, tuple(places), _round_up(max(end, 1), ALIGN * slices), share)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
