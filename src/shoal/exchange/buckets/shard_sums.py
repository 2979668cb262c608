"""Reduced slices, added up over micro-batches: what zero2 keeps, and the others in deterministic mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.world.buckets import Bucket


def zeros_for(buckets: Sequence[Bucket], device: torch.device, slices: int = 1) -> list[torch.Tensor]:
    """One vector per bucket, of the size of a slice; of one slice, that of the bucket."""
    return [torch.zeros(b.size // slices, dtype=b.dtype, device=device) for b in buckets]


class SliceSums:
    """One vector per bucket, of the size of a slice."""

    def __init__(self, buckets: Sequence[Bucket], slices: int, device: torch.device) -> None:
        self._sums = zeros_for(buckets, device, slices)
        self._first = [True] * len(buckets)
        self._extra: list[tuple[int, torch.Tensor]] = []

    def target(self, bucket: Bucket) -> torch.Tensor:
        """Where the next reduction of this bucket should put its result."""
        # The first reduction overwrites the sum, which therefore needs no zeroing between steps.
        if self._first[bucket.index]:
            self._first[bucket.index] = False
            return self._sums[bucket.index]
        extra = torch.empty_like(self._sums[bucket.index])
        self._extra.append((bucket.index, extra))
        return extra

    def fold(self) -> None:
        """Reductions are complete: add what came after the first micro-batch."""
        for index, extra in self._extra:
            self._sums[index].add_(extra)
        self._extra = []

    def of(self, bucket: Bucket) -> torch.Tensor:
        return self._sums[bucket.index]

    def reset(self) -> None:
        self._first = [True] * len(self._first)
