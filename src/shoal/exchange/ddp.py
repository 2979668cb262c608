"""Data parallel: every worker has the whole model and the whole optimizer state; gradients are all-reduced.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
When to use: the model with its optimizer state fits in every worker, and workers sit on several hosts or cards.
"""

from __future__ import annotations

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
    whole_state,
)
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.exchange.buckets.shard_sums import SliceSums, zeros_for
from shoal.exchange.reduce.reduce_cost import reduction_cost
from shoal.exchange.setup import BucketOptions
from shoal.types import Promise
from shoal.world.buckets import Bucket
from shoal.world.mesh import Mesh
from shoal.world.world import Handle


class Ddp(BucketedExchange):
    """Each full bucket is all-reduced; every worker updates everything."""

    promise = Promise.EXACT
    takes_own_step = True
    compresses = True
    summary = "whole model everywhere, gradients all-reduced"
    whole_updates = True

    def allocate(self) -> list[torch.Tensor]:
        self._gradients = zeros_for(self.buckets, self.world.device)
        # A ring all-reduce sums in an order of its own; reduce-scatter and all-gather sum in rank order.
        self._sums = (
            SliceSums(self.buckets, self.owners.size, self.world.device) if self.deterministic else None
        )
        return zeros_for(self.buckets, self.world.device)

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        if self._sums is None:
            return self.reducer.all_reduce(bucket, vector)
        return self.reducer.reduce_scatter(bucket, self._sums.target(bucket), vector)

    def settle(self) -> None:
        if self._sums is not None:
            self._sums.fold()
            for bucket in self.buckets:
                self.world.all_gather(self._gradients[bucket.index], self._sums.of(bucket)).wait()

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def hand_out(self) -> None:
        if self._sums is not None:
            self._sums.reset()

    @classmethod
    def cost(
        cls, options: BucketOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        buckets = buckets_of(profile, mesh.data.size, options.bucket_mb)
        nbytes = bytes_of(buckets)
        sums = nbytes // mesh.data.size if profile.deterministic and compressor is None else 0
        times = reductions(profile, compressor is not None)
        return (
            held_cost(profile, nbytes, nbytes + sums, whole_state(profile))
            + reduction_cost(mesh.data, compressor, buckets, shapes_of(profile), False).repeated(times)
            + agreement_cost(profile, mesh.data, mesh.data, mesh)
        )
