"""ZeRO stage 2: optimizer state and gradients are cut over the workers; parameters are whole everywhere.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
When to use: as zero1, and gradients do not fit either. With gradient accumulation every micro-batch is reduced,
because no worker ever holds a whole gradient; that costs traffic which zero1 does not have.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

import torch

from shoal.exchange.flat import FlatExchange
from shoal.exchange.setup import BucketOptions
from shoal.exchange.slices import SliceSums, zeros_for
from shoal.exchange.zero1 import gather_parameters
from shoal.types import Memory, Promise
from shoal.world.buckets import Bucket, gaps_of
from shoal.world.world import Handle

IN_FLIGHT = 2
"""Vectors that may be on their way at once; when backward is faster than the wire it waits for the oldest."""


class Zero2(FlatExchange):
    """Full buckets are reduce-scattered into the worker's slice, and their vectors are used again at once."""

    promise = Promise.EXACT
    compresses = True
    summary = "optimizer state and gradients cut over the workers"
    reduces_each_micro_batch = True

    def allocate(self) -> list[torch.Tensor]:
        self._sums = SliceSums(self.buckets, self.owners.size, self.world.device)
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[Handle, torch.Tensor]] = deque()
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        if len(self._busy) >= IN_FLIGHT:
            self._release()
        vector = self._take(bucket)
        for start, stop in gaps_of([(p.start, p.numel) for p in bucket.places], bucket.size):
            vector[start:stop].zero_()  # the vector's last user had its parameters elsewhere
        return vector

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        handle = self.reducer.reduce_scatter(bucket, self._sums.target(bucket), vector)
        self._busy.append((handle, vector))
        return handle

    def settle(self) -> None:
        while self._busy:
            self._release()
        self._sums.fold()

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._sums.of(bucket)

    def publish(self) -> None:
        self._sums.reset()
        gather_parameters(self)

    def _take(self, bucket: Bucket) -> torch.Tensor:
        for at, storage in enumerate(self._free):
            if storage.dtype == bucket.dtype and storage.numel() >= bucket.size:
                return self._free.pop(at)[: bucket.size]
        largest = max(b.size for b in self.buckets if b.dtype == bucket.dtype)
        regular = largest if bucket.size * 2 >= largest else bucket.size
        return torch.zeros(regular, dtype=bucket.dtype, device=self.world.device)[: bucket.size]

    def _release(self) -> None:
        handle, vector = self._busy.popleft()
        begun = perf_counter()
        handle.wait()
        self.waited += perf_counter() - begun
        base = vector._base
        self._free.append(base if base is not None else vector)

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        each = parameters * itemsize
        bucket = min(BucketOptions().bucket_mb * 2**20, each)
        return Memory(each, each / workers, each * state_per_parameter / workers, bucket)
