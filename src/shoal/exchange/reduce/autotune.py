"""Whether a compressor pays is measured, not believed: the first steps run with it and without, and the faster stays.

The steps of the trial are ordinary steps of the run. With and without take turns, so that a machine that gets slower
or faster meanwhile does so for both. A step counts from its beginning to the moment when all sums are there; the
slowest worker's time is what counts. What had not been sent when compression is given up goes along with the next
gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import torch

from shoal.compress.base import Compressor
from shoal.exchange.reduce.reducer import Reducer, Residual
from shoal.world.buckets import Bucket
from shoal.world.world import Handle, World

WARM_UP = 2
"""Steps before the trial: the first ones lay out memory and connect."""
STEPS = 2
"""Steps with, then as many without, make a round."""
ROUNDS = 3
CLEAR = 1.3
"""A difference of so many times is believed after one round."""
WORTH = 0.97
"""Compression loses something: it must be so much faster at least."""


class AutoTune(Reducer):
    """Two reducers, until one of them has turned out to be the faster."""

    def __init__(
        self, world: World, plain: Reducer, other: Reducer, compressor: Compressor, model_world: World
    ) -> None:
        self._world = world
        self._plain = plain
        self._other = other
        self._compressor = compressor
        self._model_world = model_world
        self._chosen: Reducer | None = None
        self._step = -WARM_UP
        self._began = 0.0
        self._times: tuple[list[float], list[float]] = ([], [])
        self._left: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def lay_out(self, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool) -> None:
        self._other.lay_out(buckets, shapes, scattered)

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        return self._present(bucket, vector).all_reduce(bucket, vector)

    def reduce_scatter(self, bucket: Bucket, out: torch.Tensor, vector: torch.Tensor) -> Handle:
        return self._present(bucket, vector).reduce_scatter(bucket, out, vector)

    def begin(self) -> None:
        self._began = perf_counter()

    def settle(self) -> None:
        if self._chosen is not None:
            return
        # Steps below 0 warm both ways up: first calls allocate and connect.
        if self._step >= 0:
            self._times[self._turn()].append(perf_counter() - self._began)
        self._step += 1
        if self._step > 0 and self._step % (2 * STEPS) == 0:
            self._decide(last=self._step == 2 * STEPS * ROUNDS)

    def drop(self) -> None:
        self._other.drop()
        self._left = {}

    def rescale(self, by: float) -> None:
        self._other.rescale(by)

    def residuals(self) -> list[Residual]:
        return self._other.residuals()

    def give_back(self, bucket: Bucket, start: int, stop: int, result: torch.Tensor) -> None:
        if self.compresses_now:
            self._other.give_back(bucket, start, stop, result)

    def warm(self) -> dict[str, torch.Tensor]:
        return self._other.warm()

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        self._other.warm_start(found)

    def close(self) -> None:
        self._other.close()

    @property
    def compresses_now(self) -> bool:
        """Whether the present step's sums are compressed."""
        return self._chosen not in (None, self._plain) or (self._chosen is None and self._turn() == 1)

    def _turn(self) -> int:
        """0: as it is, 1: compressed."""
        return self._step // STEPS % 2 if self._step >= 0 else self._step % 2

    def _present(self, bucket: Bucket, vector: torch.Tensor) -> Reducer:
        if self._chosen is None:
            return self._other if self.compresses_now else self._plain
        if self._left:
            for start, part in self._left.pop(bucket.index, ()):
                # What compression has left over is not lost: it goes into the first plain sum.
                vector[start : start + part.numel()].add_(part)
                part.zero_()
            if not self._left:  # nothing is kept of what is not used
                self._other = self._plain
        return self._chosen

    def _decide(self, last: bool) -> None:
        """All workers see the same numbers and choose alike."""
        # The median, because single steps are disturbed by others; the slowest worker, because the rest wait for it.
        slowest = self._world.gather_numbers([median(t) for t in self._times]).amax(0).tolist()
        plain, other = self._model_world.gather_numbers(slowest).amax(0).tolist()
        clear = max(plain, other) > CLEAR * min(plain, other)
        if not (last or clear):
            return
        pays = other < WORTH * plain
        self._chosen = self._other if pays else self._plain
        if not pays:
            for left in self._other.residuals():
                self._left.setdefault(left.bucket.index, []).append((left.start, left.tensor))
            self._other.close()
        if self._world.rank == 0:
            what = str(self._compressor)
            kept = f"{what} stays on" if pays else f"{what} is off from here on"
            print(
                f"shoal: auto: up to the sums, a step takes {plain * 1e3:.1f} ms as it is and {other * 1e3:.1f} ms "
                f"with {what}: {kept}.",
                file=sys.stderr,
            )
