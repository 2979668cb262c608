"""Buckets cut into shards: what one chain of servers holds. Pure arithmetic.

A shard is a whole bucket, or a range of one that is larger than buckets should be: one large parameter, cut so that
servers can share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.world.buckets import ALIGN, Bucket, Piece, pieces_of


@dataclass(frozen=True)
class Shard:
    """A range of a bucket; `number` is its place among the job's shards, of which the first is the ledger."""

    number: int
    bucket: Bucket
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.size * self.bucket.dtype.itemsize

    def plain_pieces(self, groups: Mapping[str, int]) -> list[list[int]]:
        """[start, numel, group] of each piece, counted in the shard."""
        return [[piece.start - self.start, piece.numel, groups[piece.name]] for piece in self.pieces]


def cut_shards(buckets: Sequence[Bucket], capacity: int, first: int = 1) -> list[Shard]:
    """All buckets as shards of at most about `capacity` bytes, numbered from `first` on.

    >>> import torch
    >>> from shoal.world.buckets import lay_out
    >>> buckets = lay_out([("w", 1000, torch.float32), ("b", 3, torch.float32)], slices=1, capacity=2048)
    >>> [(shard.number, shard.bucket.index, shard.start, shard.stop) for shard in cut_shards(buckets, 2048)]
    [(1, 0, 0, 512), (2, 0, 512, 1024), (3, 1, 0, 64)]
    """
    shards: list[Shard] = []
    for bucket in buckets:
        count = max(1, -(-bucket.nbytes // capacity)) if bucket.nbytes > 1.5 * capacity else 1
        width = -(-bucket.size // count // ALIGN) * ALIGN
        for start in range(0, bucket.size, width):
            stop = min(start + width, bucket.size)
            shards.append(Shard(first + len(shards), bucket, start, stop, pieces_of(bucket, start, stop)))
    return shards


def sum_of_slices(shards: Sequence[Shard], found: Sequence[Sequence[float]]) -> float:
    """What shards say of each slice of their buckets, added up slice by slice: as workers that own slices would."""
    slices = [0.0] * len(found[0])
    for shard, values in zip(shards, found, strict=True):
        for rank, value in enumerate(values):
            slices[rank] += shard.bucket.share * value
    return sum(slices)
