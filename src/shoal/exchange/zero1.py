"""ZeRO stage 1: optimizer state is cut over the workers; parameters and gradients are whole everywhere.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
When to use: optimizer state is what does not fit. Adam with N workers: 8 + 8/N bytes a parameter, not 16.
"""

from __future__ import annotations

import torch

from shoal.exchange.flat import FlatExchange
from shoal.exchange.slices import SliceSums, zeros_for
from shoal.types import Memory, Promise
from shoal.world.buckets import Bucket
from shoal.world.world import Handle


class Zero1(FlatExchange):
    """Each full bucket is reduce-scattered in place; a worker updates its slice; parameters are all-gathered."""

    promise = Promise.EXACT
    compresses = True
    summary = "optimizer state cut over the workers"

    def allocate(self) -> list[torch.Tensor]:
        self._gradients = zeros_for(self.buckets, self.world.device)
        self._sums = SliceSums(self.buckets, self.owners.size, self.world.device) if self.each else None
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        out = self._mine(bucket) if self._sums is None else self._sums.target(bucket)
        return self.reducer.reduce_scatter(bucket, out, vector)

    def settle(self) -> None:
        if self._sums is not None:
            self._sums.fold()

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._mine(bucket) if self._sums is None else self._sums.of(bucket)

    def publish(self) -> None:
        if self._sums is not None:
            self._sums.reset()
        gather_parameters(self)

    def _mine(self, bucket: Bucket) -> torch.Tensor:
        start, stop = self.ranges[bucket.index]
        return self._gradients[bucket.index][start:stop]

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        each = parameters * itemsize
        return Memory(each, each, each * state_per_parameter / workers)


def gather_parameters(exchange: FlatExchange) -> None:
    """Every worker gets every other's updated slice. The first layers' buckets, needed first, go first."""
    handles = [
        exchange.world.all_gather(vector, vector[start:stop])
        for vector, (start, stop) in reversed(list(zip(exchange.vectors, exchange.ranges, strict=True)))
    ]
    for handle in handles:
        handle.wait()
