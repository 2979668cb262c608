"""Gradients on their way to servers: in memory that servers of this host read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.exchange.shards import Shard
from shoal.server.client import Request
from shoal.server.link import Link
from shoal.server.message import Where
from shoal.server.slabs import Slab
from shoal.world.buckets import Bucket
from shoal.world.memory import SharedMemoryUnavailable


class Outgoing:
    """One vector per bucket. On the CPU, gradients are written there at once; from a card they are copied."""

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, there: Sequence[torch.Tensor] = ()
    ) -> None:
        """`there`: vectors to use, of which servers get bytes."""
        try:
            self._slab: Slab | None = None if there else Slab(sum(bucket.nbytes for bucket in buckets))
        except SharedMemoryUnavailable:  # servers get bytes
            self._slab = None
        self._offsets, offset = list[int](), 0
        self._vectors: list[torch.Tensor] = []
        for bucket in buckets:
            self._offsets.append(offset)
            self._vectors.append(
                there[bucket.index]
                if there
                else torch.zeros(bucket.size, dtype=bucket.dtype)
                if self._slab is None
                else self._slab.tensor(bucket.dtype, offset, bucket.size)
            )
            offset += bucket.nbytes
        self.gradients = self._vectors if device.type == "cpu" else [v.to(device) for v in self._vectors]
        """What gradients are written into."""

    def fill(self, bucket: Bucket, vector: torch.Tensor) -> None:
        """A bucket is full; its gradients are in `vector`."""
        if vector is not self._vectors[bucket.index]:
            self._vectors[bucket.index].copy_(vector)

    def part(self, shard: Shard) -> tuple[torch.Tensor, Where | None]:
        """A shard's part of its bucket, and where servers of this host find it."""
        bucket = shard.bucket
        part = self._vectors[bucket.index][shard.start : shard.stop]
        if self._slab is None:
            return part, None
        at = self._offsets[bucket.index] + shard.start * bucket.dtype.itemsize
        return part, self._slab.where(bucket.dtype, at, shard.size)


class Sent:
    """A bucket on its way."""

    def __init__(self, link: Link, requests: Sequence[Request]) -> None:
        self._link, self._requests = link, requests

    def wait(self) -> None:
        """Until all servers hold it."""
        self._link.wait(self._requests)
