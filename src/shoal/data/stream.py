"""Streams: data without a length or numbers, only an order.

Every worker reads the whole stream and keeps its own part of each global batch, so all see the same batches and know
where an epoch ends without asking each other. A sample's number is its place in the epoch. What the stream draws from
global generators is keyed by that place, so it is the same on every worker and after a restart.

Limits: everybody reads everything, and a run that goes on reads past what it has used. The order is the stream's own:
`shuffle` does nothing; `set_epoch`, if there is one, is called so that the stream can shuffle itself. It must be the
same on every worker and begin anew with each iter().
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal import seeds
from shoal.data.augment.sample_draws import keys_of, partners_among, rows_of
from shoal.data.batch import Batch
from shoal.data.cursor import Cursor, short_seed
from shoal.data.draws import Generator, NumpyGenerator, PythonGenerator, Watch
from shoal.data.feed import Feed, Portion
from shoal.data.loader import Loader
from shoal.data.picks import changes
from shoal.data.sharing import Sharing
from shoal.data.source import check_source, is_stream, join
from shoal.errors import ConfigError
from shoal.partition.base import OWN

_END = object()

_ENDLESS = 1 << 62
"""More samples than any stream has: none comes again in an epoch."""

FEW = 16
"""Samples of a first step that are kept for a look at what collate= makes of them, at most."""


class StreamPlace(NamedTuple):
    """What a step begins with: an epoch, and how many samples of it have been used."""

    step: int
    epoch: int
    position: int


class StreamLoader:
    """Hands out portions of a stream in sequence; another step makes it read on, or anew from the beginning.

    >>> class Count:
    ...     def __iter__(self):
    ...         return iter(range(5))
    >>> loader = StreamLoader(Feed(data=Count(), global_batch=4, rank=0, size=2))
    >>> loader.take(0).batches, loader.take(1).batches, loader.take(2).epoch
    ((tensor([0, 1]),), (tensor([4]),), 1)
    >>> loader.cursor(1).position, loader.ended(2, epochs=1)
    (4, True)
    """

    steps_per_epoch: None = None
    """Not known before an epoch is over."""
    lag = 0
    """Nothing is prepared ahead."""

    def __init__(self, feed: Feed) -> None:
        check_source(feed.data, feed.global_batch)
        _check(feed)
        self.feed = feed
        self._sharing = Sharing(feed.partition.weights(feed.parts))
        self._begin = self._at = StreamPlace(0, 0, 0)
        self.handed = 0
        """Samples of this worker in the portion that was handed out last."""
        self.first: list[object] | None = None if feed.collate is not None and feed.parts > 1 else []
        """Copies of the first samples, which cannot be read again; None before they are there."""
        self._samples: Iterator[object] | None = None
        self._next: object = _END
        self._watch = Watch(NumpyGenerator(), PythonGenerator())
        self._keyed: Sequence[Generator] = ()

    def take(self, step: int, part: int | None = None) -> Portion:
        """This worker's portion of step `step`, counted from 0; no other's."""
        if part not in (None, self.feed.rank):
            raise ConfigError(
                "ps hands out parts of steps, and a stream cannot go back for one; use data with len()."
            )
        before: StreamPlace | None = None

        def read(keyed: Sequence[Generator]) -> Portion:
            nonlocal before
            # `Watch` calls again when it has found a generator that the stream draws from.
            if before is not None:  # again, with what it draws keyed: from the beginning of the epoch
                self._at = before
                self._samples = None
            before = self._at
            self._keyed = keyed
            return self._take(step)

        return self._watch(read)

    def _take(self, step: int) -> Portion:
        self._seek(step)
        feed = self.feed
        at = self._at
        samples = self._read()
        ids = np.arange(at.position, at.position + len(samples))
        seed = seeds.derive(feed.seed, "partition", at.epoch, at.position)
        parts = feed.partition.divide(ids, ids, self._sharing.at(step)[1], seed)
        if self.first is None:
            self.first = _copies(samples[:FEW])
        parts = parts[feed.first : feed.first + feed.accumulate]
        mine = [[samples[i] for i in (part - at.position).tolist()] for part in parts]
        counts = tuple(len(some) > 0 for some in mine)
        if feed.fill:
            mine = [some or samples[:1] for some in mine]
        numbers = [part.tolist() or ids[:1].tolist() for part in parts]
        batches = tuple(
            self._batch(step, number, samples, at, which if some else [])
            for number, (some, which) in enumerate(zip(mine, numbers, strict=True), feed.first)
        )
        self.handed = sum(map(len, mine))
        return Portion(at.epoch, len(samples), batches, counts, self.handed, feed.first)

    def cursor(self, step: int) -> Cursor:
        """Where the stream stands after `step` steps."""
        self._seek(step)
        feed = self.feed
        at = self._at
        return Cursor(at.epoch, at.position, 0, short_seed(feed.seed), feed.global_batch, shuffle=False)

    def go_on(self, step: int, state: Mapping[str, object]) -> list[str]:
        """Let step `step` begin where a cursor stood; sentences say what has changed since. Earlier steps are gone."""
        cursor = Cursor.from_state(state)
        self._begin = self._at = StreamPlace(step, cursor.epoch, cursor.position)
        self._samples = None
        return changes(cursor, self.cursor(step))

    def reshare(self, step: int, shares: Sequence[float]) -> None:
        """From step `step` on, workers get parts in these proportions. Every worker calls it alike."""
        self._sharing.change(step, shares)

    def steps_until(self, epochs: float) -> int | None:
        """None: only the end of a stream tells. Ask `ended` after each step."""
        del epochs
        return None

    def ended(self, step: int, epochs: float) -> bool:
        """Whether so many epochs are complete after `step` steps."""
        if epochs != int(epochs):
            raise ConfigError(
                f"{epochs:g} epochs of a stream: its length is not known; give whole epochs, or steps."
            )
        self._seek(step)
        return self._at.epoch >= epochs

    def skew(self, steps: int = 64) -> tuple[float, int] | None:
        """None: looking ahead would use samples up."""
        del steps
        return None

    def _batch(
        self, step: int, number: int, samples: list[Any], at: StreamPlace, numbers: list[int]
    ) -> Batch | None:
        """A micro-batch of some of a step's samples: all are here, and so are those that these are mixed with."""
        if not numbers:
            return None
        feed = self.feed
        augment = feed.augment
        self._key(seeds.derive(feed.seed, "data", step, number))
        if augment is None:
            return join([samples[i - at.position] for i in numbers], numbers, feed.collate)
        tickets = np.array(numbers, dtype=np.int64)
        rows = None
        if augment.mixes:
            every = np.arange(at.position, at.position + len(samples))
            key = seeds.derive(feed.seed, "partners", at.epoch, at.position)
            tickets, rows = rows_of(tickets, partners_among(tickets, every, key))
        keys = keys_of(tickets, _ENDLESS, feed.seed, at.epoch)
        varied = [
            augment.sample(samples[i - at.position], k)
            for i, k in zip(tickets.tolist(), keys.tolist(), strict=True)
        ]
        return augment.batch(join(varied, tickets.tolist(), feed.collate), keys, rows)

    def _seek(self, step: int) -> None:
        """Stand before a step."""
        if step < self._begin.step:
            raise ConfigError(
                f"step {step + 1} lies before step {self._begin.step + 1}, with which this run goes on; where its "
                "samples were is not known any more."
            )
        if step < self._at.step:
            self._at = self._begin
            self._samples = None
        while self._at.step < step:
            self._read()

    def _read(self) -> list[object]:
        """The samples of the next step, and the first after them: so everybody knows whether the epoch is over."""
        if self._samples is None:
            self._open()
        step, epoch, position = self._at
        samples: list[object] = []
        while len(samples) < self.feed.global_batch and self._next is not _END:
            samples.append(self._next)
            position += 1
            self._next = self._pull(epoch, position)
        self._at = StreamPlace(step + 1, epoch, position)
        if self._next is _END:
            self._at = StreamPlace(step + 1, epoch + 1, 0)
            self._samples = None
        return samples

    def _open(self) -> None:
        """Begin an epoch, and read past what has been used of it."""
        data = self.feed.data
        (_, epoch, used) = self._at
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        self._key(seeds.derive(self.feed.seed, "stream", epoch))
        self._samples = iter(data)
        for position in range(used + 1):
            self._next = self._pull(epoch, position)
            if self._next is _END:
                raise ConfigError(
                    f"the stream ended after {position} samples of epoch {epoch}, and sample {used} is the next; "
                    "every iter() of data= must begin anew and give the same samples, on every worker and in every run."
                )

    def _pull(self, epoch: int, position: int) -> object:
        assert self._samples is not None
        self._key(seeds.derive(self.feed.seed, "stream", epoch, position))
        try:
            return next(self._samples, _END)
        except Exception as error:
            error.add_note(f"shoal: this was in sample {position} of epoch {epoch} of the stream.")
            raise

    def _key(self, key: int) -> None:
        """torch's generators always: what else the stream draws from is found out."""
        seeds.continue_from(key)
        for generator in self._keyed:
            generator.seed(key)


def _copies(samples: list[object]) -> list[object]:
    try:
        return copy.deepcopy(samples)
    except Exception:  # what cannot be copied is not looked at
        return []


def _check(feed: Feed) -> None:
    """Refuse what needs samples by number."""
    if feed.workers:
        raise ConfigError(
            f"loader_workers={feed.workers} with a stream: processes that prepare ahead ask for samples by number; use "
            "loader_workers=0, and let the stream itself work ahead."
        )
    if feed.columns or feed.partition.keyed_by != OWN or feed.partition.reach:
        raise ConfigError(
            f"a stream has no columns to divide by '{feed.partition.keyed_by}'; use a partition by '{OWN}', such as "
            "block, and leave columns= out."
        )


def make_loader(feed: Feed) -> Loader | StreamLoader:
    """The loader for a kind of data."""
    return StreamLoader(feed) if is_stream(feed.data) else Loader(feed)
