"""An order of the user's own: what a sampler gives, epoch by epoch.

A sampler is iterated once an epoch, on every worker, with torch's, numpy's and Python's global generators (and a
`generator` of its own) set to a key of (seed, epoch). So all workers get the same order, and so does a run that goes
on in the middle of an epoch. It gives numbers of samples, or lists of them: then these are the global batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import xxhash

from shoal.data.draws import Generator, NumpyGenerator, PythonGenerator, TorchGenerator
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.seeds import derive

Sampler = Iterable[Any]
"""Its iter() gives the numbers of an epoch's samples, or its batches as lists of numbers."""

_ENDLESS = 1024
"""An epoch this many times as long as the data set has no end."""


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch."""

    ids: Ids
    """Sample numbers; of one that comes again, the number plus so many times the size of the data set."""
    ends: Ids
    """Where each of the sampler's own batches ends; empty if it gives single samples."""


class SampledOrder:
    """The face of `GlobalOrder`, over what a sampler gives.

    >>> SampledOrder([2, 0, 2], num_samples=3, seed=0).ids(epoch=0, start=0, stop=3)
    array([2, 0, 5])
    """

    shuffle = False
    """The order is the sampler's own."""

    def __init__(self, sampler: Sampler, num_samples: int, seed: int) -> None:
        """`num_samples`: in the data set, not in an epoch."""
        self.num_samples = num_samples
        self.seed = seed
        self._sampler = sampler
        self._kept: dict[int, Epoch] = {}
        first = self.epoch(0)
        self.own_batches = len(first.ends) > 0
        self._kept = {}
        # Drawn twice on purpose: every worker draws it for itself, and a run that is resumed draws it again.
        if not np.array_equal(first.ids, self.epoch(0).ids):
            raise ConfigError(
                f"the sampler {type(sampler).__name__} gave another order when the same epoch was begun again; let it "
                "draw from torch's, numpy's or Python's global generators, or from what set_epoch(epoch) tells it."
            )

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The samples at positions [start, stop) of an epoch."""
        return self.epoch(epoch).ids[start:stop]

    def length(self, epoch: int) -> int:
        """How many samples an epoch has."""
        return len(self.epoch(epoch).ids)

    def checksum(self) -> int:
        """Checksum of the first epoch, to compare with that of other workers."""
        first = self.epoch(0)
        return int(xxhash.xxh32_intdigest(first.ids.tobytes() + first.ends.tobytes()))

    def epoch(self, number: int) -> Epoch:
        """What the sampler gives in an epoch."""
        if number not in self._kept:
            # Around an epoch's end, steps of both are prepared.
            self._kept = {k: v for k, v in self._kept.items() if abs(k - number) <= 1}
            self._kept[number] = self._draw(number)
        return self._kept[number]

    def _draw(self, epoch: int) -> Epoch:
        with _keyed(self._sampler, derive(self.seed, "sampler", epoch)):
            # A batch sampler may hand set_epoch on or not; told twice is told once.
            for holder in layers(self._sampler):
                if hasattr(holder, "set_epoch"):
                    holder.set_epoch(epoch)
            # One more than allowed, to tell a sampler without end from a long one.
            given = list(islice(iter(self._sampler), _ENDLESS * self.num_samples + 1))
        if not given or len(given) > _ENDLESS * self.num_samples:
            raise ConfigError(
                f"the sampler {type(self._sampler).__name__} gave {len(given)} entries for epoch {epoch} of "
                f"{self.num_samples} samples; its iter() has to begin an epoch anew each time, and to end it."
            )
        batches = [list(entry) for entry in given] if _is_batch(given[0]) else []
        ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        numbers = self._numbers(list(chain.from_iterable(batches)) if batches else given)
        # Numbers stay unique in an epoch: `ids % num_samples` is the sample.
        return Epoch(numbers + self.num_samples * _times_before(numbers), np.unique(ends))

    def _numbers(self, given: list[Any]) -> Ids:
        try:
            numbers = np.array([entry.__index__() for entry in given], dtype=np.int64)
        except (AttributeError, TypeError):
            odd = next(entry for entry in given if not hasattr(entry, "__index__"))
            raise ConfigError(
                f"the sampler {type(self._sampler).__name__} gave {odd!r}; it has to give numbers of samples, or lists "
                "of numbers."
            ) from None
        outside = numbers[(numbers < 0) | (numbers >= self.num_samples)]
        if len(outside):
            raise ConfigError(
                f"the sampler {type(self._sampler).__name__} gave sample {outside[0]}, and the data set has "
                f"{self.num_samples}; use one that was made for this data set."
            )
        return numbers


def _is_batch(entry: object) -> bool:
    if isinstance(entry, np.ndarray | torch.Tensor):
        return entry.ndim > 0
    return isinstance(entry, list | tuple)


def _times_before(numbers: Ids) -> Ids:
    """For each entry how often it has come before.

    >>> _times_before(np.array([4, 7, 4, 4]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(numbers, kind="stable")
    sorted_ = numbers[order]
    begins = np.flatnonzero(np.diff(sorted_, prepend=sorted_[0] - 1))
    place = np.arange(len(numbers)) - np.repeat(begins, np.diff(begins, append=len(numbers)))
    found = np.empty_like(numbers)
    found[order] = place
    return found


def layers(sampler: object) -> Iterator[Any]:
    """A sampler, and the one that it makes batches of."""
    yield sampler
    inner = getattr(sampler, "sampler", None)
    if inner is not None and inner is not sampler:
        yield from layers(inner)


@contextmanager
def _keyed(sampler: Sampler, key: int) -> Iterator[None]:
    """Global generators, and the sampler's own, continue from a key; afterwards they are as they were."""
    everywhere: tuple[Generator, ...] = (TorchGenerator(), NumpyGenerator(), PythonGenerator())
    own = [getattr(layer, "generator", None) for layer in layers(sampler)]
    held = [generator for generator in own if isinstance(generator, torch.Generator)]
    before = [generator.state() for generator in everywhere]
    held_before = [generator.get_state() for generator in held]
    for one in everywhere:
        one.seed(key)
    for generator in held:
        generator.manual_seed(key)
    try:
        yield
    finally:
        for one, state in zip(everywhere, before, strict=True):
            one.restore(state)
        for generator, tensor in zip(held, held_before, strict=True):
            generator.set_state(tensor)


class SampledTrack:
    """The face of `Track`, where an epoch is as long as the sampler makes it, and batches may be its own.

    >>> track = SampledTrack(SampledOrder([[0, 1, 2], [4]], num_samples=5, seed=0), batch=4)
    >>> [track.span(step) for step in range(3)]
    [(0, 0, 3), (0, 3, 4), (1, 0, 3)]
    """

    def __init__(
        self,
        order: SampledOrder,
        batch: int,
        drop_last: bool = False,
        step: int = 0,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        """Step `step` begins at `position` of `epoch`."""
        self.batch = batch
        self.step = step
        self.epoch = epoch
        self._order = order
        self._drop_last = drop_last
        self._position = position
        self._begins = [step]
        """The first step of each epoch, from this one on."""

    @property
    def per_epoch(self) -> int:
        """Steps of the epoch that the run stands in."""
        return len(self._ends(self.epoch, 0))

    def span(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, and its positions [start, stop)."""
        if step < self.step:
            raise ConfigError(
                f"step {step + 1} lies before step {self.step + 1}, with which this run goes on; where its samples "
                "were is not known any more."
            )
        while self._begins[-1] <= step:
            self._extend()
        ahead = int(np.searchsorted(self._begins, step, side="right")) - 1
        epoch = self.epoch + ahead
        begin = self._position if ahead == 0 else 0
        ends = self._ends(epoch, begin)
        number = step - self._begins[ahead]
        return epoch, int(ends[number - 1]) if number else begin, int(ends[number])

    def until(self, epochs: float) -> int:
        """How many steps the run has made when so many epochs are complete; at least those that it has made already."""
        whole = int(epochs)
        if whole < self.epoch:
            return self.step
        while len(self._begins) <= whole - self.epoch:
            self._extend()
        first = self._begins[whole - self.epoch]
        part = epochs - whole
        if not part:
            return first
        return first + round(part * len(self._ends(whole, self._position if whole == self.epoch else 0)))

    def _extend(self) -> None:
        epoch = self.epoch + len(self._begins) - 1
        begin = self._position if epoch == self.epoch else 0
        steps = len(self._ends(epoch, begin))
        if not steps and not begin:
            raise ConfigError(
                f"epoch {epoch} of the sampler has no full batch of {self.batch}, and drop_last leaves out what is "
                "shorter; use a smaller global_batch."
            )
        self._begins.append(self._begins[-1] + steps)

    def _ends(self, epoch: int, begin: int) -> Ids:
        """Where the batches of an epoch end that begin at a position or later."""
        found = self._order.epoch(epoch)
        if len(found.ends):
            return found.ends[found.ends > begin]
        samples = len(found.ids)
        ends = np.arange(begin + self.batch, samples + 1, self.batch)
        rest = (samples - begin) % self.batch
        return ends if self._drop_last or not rest else np.append(ends, samples)
