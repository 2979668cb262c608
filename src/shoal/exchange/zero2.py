"""ZeRO stage 2: optimizer state and gradients are cut over the workers; parameters are whole everywhere.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
When to use: as zero1, and gradients do not fit either. With gradient accumulation every micro-batch is reduced,
because no worker ever holds a whole gradient; that costs traffic which zero1 does not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import torch

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.buckets.bucket_cost import (
    agreement_cost,
    buckets_of,
    bytes_of,
    held_cost,
    reductions,
    shapes_of,
    slice_state,
)
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.exchange.buckets.shard_sums import SliceSums, zeros_for
from shoal.exchange.reduce.reduce_cost import reduction_cost
from shoal.exchange.setup import BucketOptions
from shoal.exchange.zero1 import gather_cost, gather_parameters
from shoal.torch_private import base_of
from shoal.types import Promise
from shoal.world.buckets import Bucket, gaps_of
from shoal.world.mesh import Mesh
from shoal.world.world import Handle

IN_FLIGHT = 2
"""Vectors that may be on their way at once; when backward is faster than the wire it waits for the oldest."""


class Zero2(BucketedExchange):
    """Full buckets are reduce-scattered into the worker's slice, and their vectors are used again at once."""

    promise = Promise.EXACT
    takes_own_step = True
    compresses = True
    summary = "optimizer state and gradients cut over the workers"
    reduces_each_micro_batch = True

    def allocate(self) -> list[torch.Tensor]:
        self._sums = SliceSums(self.buckets, self.owners.size, self.world.device)
        self._free: list[torch.Tensor] = []
        self._busy: deque[tuple[Handle, torch.Tensor]] = deque()
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        # Backward waits here, so that gradients take the memory of a few buckets and not of the model.
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

    def hand_out(self) -> None:
        self._sums.reset()
        gather_parameters(self)

    def _take(self, bucket: Bucket) -> torch.Tensor:
        for at, storage in enumerate(self._free):
            if storage.dtype == bucket.dtype and storage.numel() >= bucket.size:
                return self._free.pop(at)[: bucket.size]
        return torch.zeros(_vector_size(bucket, self.buckets), dtype=bucket.dtype, device=self.world.device)[
            : bucket.size
        ]

    def _release(self) -> None:
        handle, vector = self._busy.popleft()
        begun = perf_counter()
        handle.wait()
        self.waited += perf_counter() - begun
        # `vector` may be the beginning of a longer one: give back all of it, or it would shrink each time.
        base = base_of(vector)
        self._free.append(base if base is not None else vector)

    @classmethod
    def cost(
        cls, options: BucketOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        buckets = buckets_of(profile, mesh.data.size, options.bucket_mb)
        nbytes = bytes_of(buckets)
        times = reductions(profile, compressor is not None, always=True)
        return (
            held_cost(profile, nbytes, nbytes // mesh.data.size, slice_state(profile, buckets, mesh.data))
            + reduction_cost(mesh.data, compressor, buckets, shapes_of(profile), True).repeated(times)
            + gather_cost(buckets, mesh.data)
            + agreement_cost(profile, mesh.data, mesh.data, mesh)
            + Cost({"working": sum(_vectors_in_flight(buckets))})
        )


def _vector_size(bucket: Bucket, buckets: Sequence[Bucket]) -> int:
    """Elements of a new vector for a bucket: as for the largest, if that is not much more, so that most fit all."""
    largest = max(b.size for b in buckets if b.dtype == bucket.dtype)
    return largest if bucket.size * 2 >= largest else bucket.size


def _vectors_in_flight(buckets: Sequence[Bucket]) -> list[int]:
    """Bytes of each vector there will be, if gradients become ready bucket by bucket."""
    made: list[int] = []
    free: list[tuple[torch.dtype, int]] = []
    busy: deque[tuple[torch.dtype, int]] = deque()
    for bucket in buckets:
        if len(busy) >= IN_FLIGHT:
            free.append(busy.popleft())
        fitting = [one for one in free if one[0] == bucket.dtype and one[1] >= bucket.size]
        if fitting:
            free.remove(fitting[0])
        else:
            fitting = [(bucket.dtype, _vector_size(bucket, buckets))]
            made.append(fitting[0][1] * bucket.dtype.itemsize)
        busy.append(fitting[0])
    return made
