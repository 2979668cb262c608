"""Each worker's part of each step.

A step's global batch is divided into workers × accumulate micro-batches by the partition; each worker
takes `accumulate` neighbours. So the micro-batches of a step, and with them dropout streams, depend only on
that product: one worker with accumulate=4 computes what four workers with accumulate=1 do. What a sample
draws (augmentation) is keyed by epoch and sample, in loader processes and without them.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing.process
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from shoal import seeds
from shoal.data.augment.sample_draws import keys_of, rows_of
from shoal.data.batch import Batch
from shoal.data.cursor import Cursor
from shoal.data.dataloader import WorkerInit
from shoal.data.draws import Generator, NumpyGenerator, PythonGenerator, TorchGenerator, Watch
from shoal.data.feed import Feed, Portion
from shoal.data.picks import Picks
from shoal.data.source import check_source, fetch, fetch_samples, is_plain, join
from shoal.partition.cuts import Ids
from shoal.partition.skew import skew

__all__ = ["Feed", "Loader", "Portion"]


_PREFETCH = 2
"""Batches that each process prepares ahead."""
_PR_SET_PDEATHSIG = 1
_SKIPPED = 16
"""More steps than this are not skipped one by one: processes begin anew."""


class Loader:
    """Hands out portions by step number, in any order; in sequence it works ahead.

    >>> loader = Loader(Feed(data=list(range(10)), global_batch=4, rank=0, size=2, shuffle=False))
    >>> loader.steps_per_epoch
    3
    >>> loader.take(0).batches, loader.take(2).batches
    ((tensor([0, 1]),), (tensor([8]),))

    A place in the data does not depend on who takes part, nor on the size of batches:

    >>> state = loader.cursor(2).to_state()
    >>> alone = Loader(Feed(data=list(range(10)), global_batch=1, rank=0, size=1, shuffle=False))
    >>> alone.go_on(2, state)
    ['global_batch was 4 and is 1: epoch 0 goes on from sample 8 in batches of the new size']
    >>> alone.take(2).batches, alone.steps_until(1)
    ((tensor([8]),), 4)
    """

    def __init__(self, feed: Feed) -> None:
        check_source(feed.data, feed.global_batch, feed.sampler is not None)
        self.feed = feed
        self._picks = Picks(feed)
        self.steps_per_epoch = self._picks.track.per_epoch
        self._prepare = _Fetcher(feed)
        self._ahead: Iterator[Batch] | None = None
        self._reached = _FetchedAhead()
        self._expected = -1
        self._peeked: tuple[int, Portion] | None = None
        self.handed = 0
        """Samples of this worker in the portion that was handed out last."""

    def peek(self, step: int) -> Portion:
        """This worker's own portion of a step to come; `take` hands it out without preparing it again."""
        if self._peeked is None or self._peeked[0] != step:
            handed = self.handed
            self._peeked = (step, self.take(step))
            self.handed = handed
        return self._peeked[1]

    def take(self, step: int, part: int | None = None) -> Portion:
        """This worker's portion of step `step`, counted from 0; or another's, or nobody's (-1)."""
        if self._peeked is not None and self._peeked[0] == step and part in (None, self.feed.rank):
            found = self._peeked[1]
            self._peeked = None
            self.handed = found.own
            return found
        epoch, samples, ids, counts = self._picks.of(step, part)
        own = part is None or part == self.feed.rank
        first = self.feed.first if part is None else max(part, 0) * self.feed.accumulate
        if self.feed.workers and own:
            batches = self._from_workers(step, ids)
        else:
            batches = tuple(
                [
                    self._prepare[step, number, epoch, some, self._picks.partners(step, some)]
                    if len(some)
                    else None
                    for number, some in enumerate(ids, first)
                ]
            )
        self.handed = sum(map(len, ids)) if any(counts) else 0
        return Portion(epoch, samples, batches, counts, self.handed, first)

    def samples(self, step: int) -> list[int]:
        """This worker's own of a step, by number."""
        return [number for some in self.samples_of(step) for number in some]

    def samples_of(self, step: int) -> list[list[int]]:
        """The same by micro-batch."""
        found = self._picks.of(step)[2]
        every = None if self.feed.sampler is None else len(self.feed.data)
        return [[int(i) if every is None else int(i) % every for i in ids] for ids in found]

    def cursor(self, step: int) -> Cursor:
        """Where the data stand after `step` steps, whatever has been prepared ahead."""
        return self._picks.cursor(step)

    def go_on(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Let step `step` begin where a cursor stood; sentences say what has changed since. Earlier steps are gone."""
        self._ahead = self._peeked = None
        return self._picks.go_on(step, Cursor.from_state(state))

    @property
    def lag(self) -> int:
        """So many steps to come are most likely prepared already, or under way; the same on every worker."""
        return -(-_PREFETCH * self.feed.workers // self.feed.accumulate)

    def reshare(self, step: int, shares: Sequence[float]) -> None:
        """From step `step` on, workers get parts in these proportions. Every worker calls it alike.

        What has been prepared for such a step under the old ones is let go, and processes begin anew. It costs nothing
        from `lag` steps after the next one on.
        """
        self._picks.sharing.change(step, shares)
        if self._reached.step >= step:
            self._ahead = None
        if self._peeked is not None and self._peeked[0] >= step:
            self._ahead = self._peeked = None

    def checksum(self) -> int:
        """Checksum of an order that a sampler gives, which has to be the same on every worker."""
        return self._picks.checksum()

    @property
    def own_batches(self) -> bool:
        """Whether a sampler makes whole batches."""
        return self._picks.own_batches

    def steps_until(self, epochs: float) -> int | None:
        """How many steps the run has made when so many epochs are complete; None if that is not known before."""
        return self._picks.track.until(epochs)

    def ended(self, step: int, epochs: float) -> bool:
        """Whether so many epochs are complete after `step` steps."""
        return step >= self._picks.track.until(epochs)

    def skew(self, steps: int = 64) -> tuple[float, int] | None:
        """How uneven micro-batches are, and over how many steps; None if that is not known before."""
        steps = min(steps, self.steps_per_epoch)
        first = self._picks.track.step
        found = [self._picks.sizes(step) for step in range(first, first + steps)]
        return skew(found, self.feed.partition.weights(self.feed.parts)), steps

    def _from_workers(self, step: int, ids: list[Ids]) -> tuple[Batch | None, ...]:
        if self._ahead is None or not self._expected <= step < self._expected + _SKIPPED:
            self._ahead = self._work_ahead(step)
        elif (
            step > self._expected
        ):  # steps in between were others' to do; what was prepared for them is let go
            for skipped in range(self._expected, step):
                for some in self._picks.of(skipped)[2]:
                    if len(some):
                        next(self._ahead)
        self._expected = step + 1
        return tuple(next(self._ahead) if len(i) else None for i in ids)

    def _work_ahead(self, step: int) -> Iterator[Batch]:
        # Nothing here leads back to this loader. With a cycle, its processes would be ended by the garbage collector,
        # which keeps it waiting for ten seconds.
        self._ahead = None
        self._reached = _FetchedAhead()
        return iter(
            DataLoader(
                self._prepare,
                batch_size=None,
                # A copy: processes ask for steps to come while `take` asks for the present one, and each moves its own
                # window.
                sampler=_ids_from(copy.copy(self._picks), step, self._reached),
                num_workers=self.feed.workers,
                prefetch_factor=_PREFETCH,
                pin_memory=self.feed.pin_memory,
                worker_init_fn=partial(_begin_worker, self.feed.worker_init, _parent()),
                # A generator of its own: DataLoader would otherwise draw from the global one at every start.
                generator=torch.Generator().manual_seed(seeds.derive(self.feed.seed, "loader")),
            )
        )


def _parent() -> int:
    """The process that loader processes must not outlive; 0 where the kernel cannot tell them.

    It tells them of the end of the thread that has started them, and only the main thread ends with its process.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def _begin_worker(users: WorkerInit | None, parent: int, number: int) -> None:
    """Ctrl-C in a terminal reaches every process; what it means is for the training process to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        # torch's own handler would end the process too, and leave its temporary folder.
        signal.signal(signal.SIGTERM, _end_with_parent)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            _end_with_parent(signal.SIGTERM, None)
    if users is not None:
        users(number)


def _end_with_parent(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    temporary = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if temporary and os.path.basename(temporary).startswith("pymp-"):
        shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0)


Wanted = tuple[int, int, int, Ids, Ids | None]
"""A step, the number of a micro-batch in it, the epoch, the micro-batch's samples, and what each is mixed with."""


class _FetchedAhead:
    """How far processes have been sent ahead."""

    step = -1


def _ids_from(picks: Picks, step: int, reached: _FetchedAhead) -> Iterator[Wanted]:
    """The micro-batches of this worker from a step on, for ever."""
    while True:
        reached.step = step
        epoch, _, ids, _ = picks.of(step)
        for number, some in enumerate(ids, picks.feed.first):
            if len(some):
                yield step, number, epoch, some, picks.partners(step, some)
        step += 1


class _Fetcher(Dataset[Batch]):
    """Runs where batches are prepared: ids in, a batch out."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._samples = len(feed.data)
        self._functions = feed.augment is not None and bool(feed.augment.functions)
        self._plain = is_plain(feed.data, feed.collate) and not self._functions
        self._watch = Watch(TorchGenerator(), NumpyGenerator(), PythonGenerator())

    def __getitem__(self, wanted: Wanted) -> Batch:
        step, number, epoch, tickets, partners = wanted
        augment = self._feed.augment
        if augment is None:
            return self._fetch(step, number, epoch, tickets)
        rows = None
        if partners is not None:
            tickets, rows = rows_of(tickets, partners)
        batch = self._fetch(step, number, epoch, tickets)
        return augment.batch(batch, keys_of(tickets, self._samples, self._feed.seed, epoch), rows)

    def _fetch(self, step: int, number: int, epoch: int, tickets: Ids) -> Batch:
        feed = self._feed
        ids = tickets if feed.sampler is None else tickets % self._samples
        if self._plain:  # rows of tensors: nothing draws
            return fetch(feed.data, ids, feed.collate)
        seeds.set_stream(feed.seed, "data", step, number)

        def read(keyed: Sequence[Generator]) -> Batch:
            if not keyed and not self._functions:
                return fetch(feed.data, ids, feed.collate)
            samples = []
            for ticket, one in zip(tickets.tolist(), ids.tolist(), strict=True):
                # By sample, not by place in the batch: an augmentation stays the same at any number of workers.
                key = seeds.sample_key(feed.seed, epoch, one, ticket // self._samples)
                for generator in keyed:
                    generator.seed(key)
                samples += [self._vary(sample, key, one) for sample in fetch_samples(feed.data, [one])]
            if feed.collate is not None:  # draws for a whole micro-batch at once
                key = seeds.derive(feed.seed, "data", step, number)
                for generator in keyed:
                    generator.seed(key)
            return join(samples, ids.tolist(), feed.collate)

        return self._watch(read)

    def _vary(self, sample: object, key: int, number: int) -> object:
        """A sample through the user's functions of augment=."""
        augment = self._feed.augment
        if augment is None or not self._functions:
            return sample
        try:
            return augment.sample(sample, key)
        except Exception as error:
            error.add_note(f"shoal: this was in augment= of data[{number}].")
            raise
