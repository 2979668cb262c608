"""Each worker's part of each step.

A step's global batch is cut into workers × accumulate contiguous micro-batches, as equal as can be; each worker
takes `accumulate` neighbours. So the micro-batches of a step, and with them dropout streams, depend only on
that product: one worker with accumulate=4 computes what four workers with accumulate=1 do. What a data set
draws from torch's generator (augmentation) is keyed in the same way, in loader processes and without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shoal import seeds
from shoal.data.batch import Batch, Collate
from shoal.data.order import GlobalOrder, Ids, split
from shoal.data.source import Source, check_source, fetch, is_plain

_WINDOW = 8192
"""Ids are computed this many at a time: a step of small batches should not pay for setting up the order."""


@dataclass(frozen=True)
class Feed:
    """What a loader needs to know."""

    data: Source
    global_batch: int
    rank: int
    size: int
    accumulate: int = 1
    seed: int = 0
    shuffle: bool = True
    collate: Collate | None = None
    workers: int = 0
    """Processes that prepare batches ahead; 0 prepares them in the training process when they are needed."""
    fill: bool = False
    """Give a micro-batch without samples the first sample of its step as a filler, which counts nothing."""


@dataclass(frozen=True)
class Portion:
    """One worker's part of one step."""

    epoch: int
    samples: int
    """Samples in the whole global batch."""
    batches: tuple[Batch | None, ...]
    """This worker's micro-batches; None where the last batch of an epoch leaves nothing for one."""
    counts: tuple[bool, ...]
    """Which of them hold samples of their own; the others are None, or fillers."""
    first: int
    """Number of the first of them among all micro-batches of the step."""


class Loader:
    """Hands out portions by step number, in any order; in sequence it works ahead.

    >>> loader = Loader(Feed(data=list(range(10)), global_batch=4, rank=0, size=2, shuffle=False))
    >>> loader.steps_per_epoch
    3
    >>> loader.take(0).batches, loader.take(2).batches
    ((tensor([0, 1]),), (tensor([8]),))
    """

    def __init__(self, feed: Feed) -> None:
        check_source(feed.data, feed.global_batch)
        self.feed = feed
        self._count = len(feed.data)
        self._order = GlobalOrder(self._count, feed.seed, feed.shuffle)
        self.steps_per_epoch = -(-self._count // feed.global_batch)
        self._window = (0, 0, np.empty(0, dtype=np.int64))
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self._counts: dict[int, tuple[bool, ...]] = {}
        self._prepare = _Fetcher(feed)
        self._ahead: Iterator[Batch] | None = None
        self._expected = -1

    def take(self, step: int) -> Portion:
        """This worker's portion of step `step`, counted from 0."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        start, stop = self._span(inside)
        ids = self._micro_ids(epoch, start, stop)
        counts = self._counts[stop - start]
        if self.feed.fill:
            ids = self._filled(ids, epoch, start)
        if self.feed.workers:
            batches = self._from_workers(step, ids)
        else:
            batches = tuple(
                [
                    self._prepare[step, number, some] if len(some) else None
                    for number, some in enumerate(ids, self.first)
                ]
            )
        return Portion(epoch, stop - start, batches, counts, self.first)

    @property
    def first(self) -> int:
        """The number of this worker's first micro-batch among all of a step."""
        return self.feed.rank * self.feed.accumulate

    def _span(self, inside: int) -> tuple[int, int]:
        start = inside * self.feed.global_batch
        return start, min(start + self.feed.global_batch, self._count)

    def _micro_ids(self, epoch: int, start: int, stop: int) -> list[Ids]:
        cuts = self._cuts.get(stop - start)  # of two sizes at most: a full batch, and the last of an epoch
        if cuts is None:
            total = self.feed.size * self.feed.accumulate
            cuts = [split(stop - start, total, self.first + i) for i in range(self.feed.accumulate)]
            self._cuts[stop - start] = cuts
            self._counts[stop - start] = tuple(a < b for a, b in cuts)
        low, high = start + cuts[0][0], start + cuts[-1][1]
        mine = self._ids(epoch, low, high)
        return [mine[start + a - low : start + b - low] for a, b in cuts]

    def _filled(self, ids: list[Ids], epoch: int, start: int) -> list[Ids]:
        if all(len(some) for some in ids):
            return ids
        filler = self._order.ids(epoch, start, start + 1)
        return [some if len(some) else filler for some in ids]

    def _ids(self, epoch: int, low: int, high: int) -> Ids:
        at, begin, ids = self._window
        if at != epoch or low < begin or high > begin + len(ids):
            ids = self._order.ids(epoch, low, min(max(high, low + _WINDOW), self._count))
            at, begin = epoch, low
            self._window = (at, begin, ids)
        return ids[low - begin : high - begin]

    def _from_workers(self, step: int, ids: list[Ids]) -> tuple[Batch | None, ...]:
        if self._ahead is None or step != self._expected:
            self._ahead = self._work_ahead(step)
        self._expected = step + 1
        return tuple(next(self._ahead) if len(i) else None for i in ids)

    def _work_ahead(self, step: int) -> Iterator[Batch]:
        # The ids come from a loader of their own. With this one there would be a cycle, and processes that the
        # garbage collector ends keep it waiting for ten seconds.
        self._ahead = None
        return iter(
            DataLoader(
                _Fetcher(self.feed),
                batch_size=None,
                sampler=_ids_from(Loader(replace(self.feed, workers=0)), step),
                num_workers=self.feed.workers,
                prefetch_factor=2,
                # A generator of its own: DataLoader would otherwise draw from the global one at every start.
                generator=torch.Generator().manual_seed(self.feed.seed),
            )
        )


Wanted = tuple[int, int, Ids]
"""A step, the number of a micro-batch in it, and its samples."""


def _ids_from(loader: Loader, step: int) -> Iterator[Wanted]:
    """The micro-batches of this worker from a step on, for ever."""
    while True:
        epoch, inside = divmod(step, loader.steps_per_epoch)
        start, stop = loader._span(inside)
        ids = loader._micro_ids(epoch, start, stop)
        ids = loader._filled(ids, epoch, start) if loader.feed.fill else ids
        yield from ((step, number, some) for number, some in enumerate(ids, loader.first) if len(some))
        step += 1


class _Fetcher(Dataset[Batch]):
    """Runs where batches are prepared: ids in, a batch out."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getitem__(self, wanted: Wanted) -> Batch:
        step, number, ids = wanted
        if not is_plain(self._feed.data, self._feed.collate):  # plain tensors draw nothing
            seeds.set_stream(self._feed.seed, "data", step, number)
        return fetch(self._feed.data, ids, self._feed.collate)
