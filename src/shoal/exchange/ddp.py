"""Data parallel: every worker has the whole model and the whole optimizer state; gradients are all-reduced.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
When to use: the model with its optimizer state fits in every worker, and workers sit on several hosts or cards.
"""

from __future__ import annotations

import torch

from shoal.exchange.flat import FlatExchange
from shoal.exchange.slices import SliceSums, zeros_for
from shoal.types import Memory, Promise
from shoal.world.buckets import Bucket
from shoal.world.world import Handle


class Ddp(FlatExchange):
    """Each full bucket is all-reduced; every worker updates everything."""

    promise = Promise.EXACT
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

    def publish(self) -> None:
        if self._sums is not None:
            self._sums.reset()

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        del workers
        each = parameters * itemsize
        return Memory(each, each, each * state_per_parameter)
