"""ZeRO stage 1: optimizer state is cut over the workers; parameters and gradients are whole everywhere.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
When to use: optimizer state is what does not fit. Adam with N workers: 8 + 8/N bytes a parameter, not 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.buckets.bucket_cost import (
    adds_slices,
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
from shoal.types import Promise
from shoal.world.buckets import Bucket
from shoal.world.mesh import Mesh
from shoal.world.traffic import share_of
from shoal.world.world import Handle, World


class Zero1(BucketedExchange):
    """Each full bucket is reduce-scattered in place; a worker updates its slice; parameters are all-gathered."""

    promise = Promise.EXACT
    takes_own_step = True
    compresses = True
    summary = "optimizer state cut over the workers"

    def allocate(self) -> list[torch.Tensor]:
        self._gradients = zeros_for(self.buckets, self.world.device)
        self._sums = SliceSums(self.buckets, self.owners.size, self.world.device) if self.each else None
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        # In place: the slice of the sum takes the place of this worker's own gradient, which nobody needs any more.
        out = self._mine(bucket) if self._sums is None else self._sums.target(bucket)
        return self.reducer.reduce_scatter(bucket, out, vector)

    def settle(self) -> None:
        if self._sums is not None:
            self._sums.fold()

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._mine(bucket) if self._sums is None else self._sums.of(bucket)

    def hand_out(self) -> None:
        if self._sums is not None:
            self._sums.reset()
        gather_parameters(self)

    def _mine(self, bucket: Bucket) -> torch.Tensor:
        start, stop = self.ranges[bucket.index]
        return self._gradients[bucket.index][start:stop]

    @classmethod
    def cost(
        cls, options: BucketOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        buckets = buckets_of(profile, mesh.data.size, options.bucket_mb)
        nbytes = bytes_of(buckets)
        sums = nbytes // mesh.data.size if adds_slices(profile, compressor is not None) else 0
        times = reductions(profile, compressor is not None)
        return (
            held_cost(profile, nbytes, nbytes + sums, slice_state(profile, buckets, mesh.data))
            + reduction_cost(mesh.data, compressor, buckets, shapes_of(profile), True).repeated(times)
            + gather_cost(buckets, mesh.data)
            + agreement_cost(profile, mesh.data, mesh.data, mesh)
        )


def gather_parameters(exchange: BucketedExchange) -> None:
    """Every worker gets every other's updated slice. The first layers' buckets, needed first, go first."""
    handles = [
        exchange.world.all_gather(vector, vector[start:stop])
        for vector, (start, stop) in reversed(list(zip(exchange.vectors, exchange.ranges, strict=True)))
    ]
    for handle in handles:
        handle.wait()


def gather_cost(buckets: Sequence[Bucket], world: World) -> Cost:
    """One all-gather of all parameters."""
    return Cost(wire={"data": sum(share_of(bucket.nbytes, world.size) for bucket in buckets)})
