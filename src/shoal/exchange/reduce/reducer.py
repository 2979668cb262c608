"""How a full bucket is summed over the workers: as it is, or compressed.

The flat-bucket exchanges ask for one of two sums and never know how it travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.world.buckets import Bucket
from shoal.world.world import Handle, World


@dataclass(frozen=True)
class Residual:
    """What this worker has not sent yet of the elements of a bucket from `start` on."""

    bucket: Bucket
    start: int
    tensor: torch.Tensor
    holders: int
    """So many workers have one for these elements; together theirs are what is missing from the sum."""


class Reducer(ABC):
    """Sums buckets. Every worker asks for the same sums in the same order."""

    @abstractmethod
    def lay_out(self, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool) -> None:
        """Lay out the buckets to sum, whole or `scattered`. Residuals of earlier buckets are dropped."""

    @abstractmethod
    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        """The sum of the whole bucket, in place."""

    @abstractmethod
    def reduce_scatter(self, bucket: Bucket, out: torch.Tensor, vector: torch.Tensor) -> Handle:
        """The sum of this worker's slice, in `out`; `vector` is used up."""

    def begin(self) -> None:
        """A step begins."""
        return

    def settle(self) -> None:
        """All sums of the step are there."""
        return

    def drop(self) -> None:
        """The step's gradients were bad: keep nothing of them."""
        return

    def rescale(self, by: float) -> None:
        """Gradients will be so many times larger from now on."""
        del by

    def residuals(self) -> list[Residual]:
        """The residuals: part of the run's state."""
        return []

    def give_back(self, bucket: Bucket, start: int, stop: int, result: torch.Tensor) -> None:
        """The sum of these elements is not used, because nobody had a gradient for them: it stays to be sent."""
        del bucket, start, stop, result

    def warm(self) -> dict[str, torch.Tensor]:
        """State of codes that they could find again in time, such as the factors of powersgd."""
        return {}

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        """Start from what was found before, as far as it fits."""
        del found

    def close(self) -> None:
        """The run is over."""
        return


class Plain(Reducer):
    """Gradients travel as they are."""

    def __init__(self, world: World) -> None:
        self._world = world

    def lay_out(self, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool) -> None:
        del buckets, shapes, scattered

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        del bucket
        return self._world.all_reduce(vector)

    def reduce_scatter(self, bucket: Bucket, out: torch.Tensor, vector: torch.Tensor) -> Handle:
        del bucket
        return self._world.reduce_scatter(out, vector)
