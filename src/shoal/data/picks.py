"""Which samples each step has, and which of them are whose. Numbers only: nothing is fetched here.

The order is the sampler's, if the user gave one, else `GlobalOrder`; a partition that sorts by length sorts the latter
in windows. A stream is read in order, by `stream.py`, and never comes here.
"""

from __future__ import annotations

import numpy as np

from shoal.data.augment.sample_draws import partners_among
from shoal.data.columns import keys_for
from shoal.data.cursor import Cursor, Track, short_seed
from shoal.data.feed import Feed
from shoal.data.grouped import GroupedOrder
from shoal.data.order import ArrivingOrder, BlockOrder, GlobalOrder, make_order
from shoal.data.sampler import SampledOrder, SampledTrack
from shoal.data.sharing import Sharing
from shoal.data.source import BatchSource
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.seeds import derive

_AHEAD = 8192
"""Ids are computed this many at a time: a step of small batches should not pay for setting up the order."""

Plain = GlobalOrder | BlockOrder | ArrivingOrder
Order = Plain | GroupedOrder | SampledOrder

Cuts = tuple[list[tuple[int, int]], tuple[bool, ...]]
"""Where a worker's micro-batches begin and end in a step, and which of them have samples."""


class Picks:
    """The samples of this worker's micro-batches, by step.

    >>> picks = Picks(Feed(data=range(10), global_batch=4, rank=1, size=2, shuffle=False))
    >>> picks.of(0)
    (0, 4, [array([2, 3])], (True,))
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._samples = len(feed.data)
        source = feed.data if isinstance(feed.data, BatchSource) else None
        self._keys = keys_for(feed.partition, feed.columns, self._samples, source)
        self.sharing = Sharing(feed.partition.weights(feed.parts))
        self._sampled = None if feed.sampler is None else SampledOrder(feed.sampler, self._samples, feed.seed)
        self._plain = make_order(
            self._samples, feed.seed, feed.shuffle, source.arrives if source is not None else 0
        )
        self._order = self._sampled or self._plain
        self._grouped = self._group(feed.global_batch, feed.partition.reach)
        self._begun: tuple[int, Order, int] = (0, self._grouped, self._samples)
        """The epoch with which the run goes on, its order and its samples: as another run had begun it."""
        self.track = self._track(0, 0, 0)
        self._window = (0, 0, np.empty(0, dtype=np.int64))
        self._cuts: dict[tuple[int, int, int], Cuts | None] = {}

    def of(self, step: int, part: int | None = None) -> tuple[int, int, list[Ids], tuple[bool, ...]]:
        """The epoch, how many samples the step has, those of each of this worker's micro-batches, and which count.

        `part`: of another worker's micro-batches; -1: of nobody's.
        """
        epoch, start, stop = self.track.span(step)
        if part == -1:
            return epoch, stop - start, [], ()
        first = self.feed.first if part is None else part * self.feed.accumulate
        cuts = self._cuts_for(step, stop - start, first)
        # Contiguous shares are cut without looking at samples: only this worker's ids are computed.
        if cuts is not None:
            bounds, counts = cuts
            low, high = start + bounds[0][0], start + bounds[-1][1]
            some = self._ids(epoch, low, high)
            mine = [some[start + a - low : start + b - low] for a, b in bounds]
        else:
            mine = self._divide(step, epoch, start, stop)[first : first + self.feed.accumulate]
            counts = tuple(len(ids) > 0 for ids in mine)
        if self.feed.fill and not all(counts):
            # Some sample, only for its shape: collectives need a backward pass from every worker. Its loss does not
            # count.
            filler = self._ids(epoch, start, start + 1)
            mine = [ids if len(ids) else filler for ids in mine]
        return epoch, stop - start, mine, counts

    def partners(self, step: int, wanted: Ids) -> Ids | None:
        """For each of some samples of a step the one that it is mixed with, of any worker; None: nothing is mixed."""
        if self.feed.augment is None or not self.feed.augment.mixes:
            return None
        epoch, start, stop = self.track.span(step)
        key = derive(self.feed.seed, "partners", epoch, start)
        return partners_among(wanted, self._ids(epoch, start, stop), key)

    def sizes(self, step: int) -> list[int]:
        """How many samples each micro-batch of a step has, over all workers."""
        return [len(ids) for ids in self._divide(step, *self.track.span(step))]

    def cursor(self, step: int) -> Cursor:
        """Where the data stand when `step` steps are done."""
        feed = self.feed
        epoch, start, _ = self.track.span(step)
        order = self._order_of(epoch)
        grain, window = (order.grain, order.window) if isinstance(order, GroupedOrder) else (0, 0)
        seed = short_seed(feed.seed)
        samples, shuffle = (
            (self._samples_of(epoch), self._plain.name(epoch)) if self._sampled is None else (0, False)
        )
        return Cursor(epoch, start, samples, seed, feed.global_batch, grain, window, shuffle)

    def go_on(self, step: int, cursor: Cursor) -> list[str]:
        """Let step `step` begin at a cursor; what has changed since it was taken, in words."""
        epoch, position = cursor.epoch, cursor.position
        begun = cursor.samples if position and self._has_grown(cursor) else self._samples
        self._begun = (epoch, self._grouped, begun)
        if position >= self._length(epoch, used=True):
            epoch, position, begun = epoch + 1, 0, self._samples
        order = make_order(begun, self.feed.seed, self.feed.shuffle) if begun < self._samples else self._order
        self._begun = (epoch, self._group(self.feed.global_batch, self.feed.partition.reach, order), begun)
        self.track = self._track(step, epoch, position)
        told = changes(cursor, self.cursor(step))
        if begun < self._samples:
            told.append(
                f"the data set has grown from {begun} to {self._samples} samples: epoch {epoch} ends with those it "
                f"began with, and the new ones come from epoch {epoch + 1} on"
            )
        if position > 0 and cursor.window and not self.feed.partition.reach:
            told.append(
                f"epoch {epoch} was sorted by length and the partition does not sort now: some of its samples come "
                "twice and others not at all"
            )
        elif position > 0:  # an epoch ends in the order in which it began
            self._begun = (epoch, self._group(cursor.grain, cursor.window, order), begun)
        self._window = (0, 0, np.empty(0, dtype=np.int64))
        return told

    def checksum(self) -> int:
        """Checksum of an order that a sampler gives; 0 for one that follows from the seed."""
        return 0 if self._sampled is None else self._sampled.checksum()

    def _track(self, step: int, epoch: int, position: int) -> Track | SampledTrack:
        batch, drop_last = self.feed.global_batch, self.feed.drop_last
        if self._sampled is not None:
            return SampledTrack(self._sampled, batch, drop_last, step, epoch, position)
        return Track(
            self._length(epoch + 1, used=True), batch, step, epoch, position, self._length(epoch, used=True)
        )

    def _length(self, epoch: int, used: bool = False) -> int:
        """How many samples an epoch has; `used`: without those of a last batch that is left out."""
        samples = self._samples_of(epoch) if self._sampled is None else self._sampled.length(epoch)
        return (
            samples - samples % self.feed.global_batch
            if used and self.feed.drop_last and not self.own_batches
            else samples
        )

    def _samples_of(self, epoch: int) -> int:
        """How many there are: an epoch that had begun before the data set grew ends as it began."""
        return self._begun[2] if epoch == self._begun[0] else self._samples

    def _has_grown(self, cursor: Cursor) -> bool:
        data = self.feed.data
        grows = isinstance(data, BatchSource) and data.grows and self._sampled is None
        return grows and 0 < cursor.samples < self._samples

    @property
    def own_batches(self) -> bool:
        """Whether a sampler makes whole batches."""
        return self._sampled is not None and self._sampled.own_batches

    def _group(self, grain: int, window: int, order: Plain | SampledOrder | None = None) -> Order:
        order = order or self._order
        if not window:
            return order
        if isinstance(order, SampledOrder):
            raise ConfigError(
                "the partition sorts the order of samples by length, and a sampler gives one; leave one of them out."
            )
        keys = np.arange(self._samples) if self._keys is None else self._keys
        return GroupedOrder(order, keys, grain, window)

    def _order_of(self, epoch: int) -> Order:
        begun, order, _ = self._begun
        return order if epoch == begun else self._grouped

    def _cuts_for(self, step: int, count: int, first: int) -> Cuts | None:
        change, weights = self.sharing.at(step)
        key = (change, count, first)
        if key not in self._cuts:  # of few sizes: a full batch, and the last of an epoch
            feed = self.feed
            cuts = feed.partition.cuts(count, weights)
            mine = None if cuts is None else cuts[first : first + feed.accumulate]
            self._cuts[key] = None if mine is None else (mine, tuple(a < b for a, b in mine))
        return self._cuts[key]

    def _divide(self, step: int, epoch: int, start: int, stop: int) -> list[Ids]:
        ids = self._ids(epoch, start, stop)
        numbers = ids if self._sampled is None else ids % self._samples
        keys = numbers if self._keys is None else self._keys[numbers]
        # What is drawn depends on the place in the data, as the samples do.
        seed = derive(self.feed.seed, "partition", epoch, start)
        return self.feed.partition.divide(ids, keys, self.sharing.at(step)[1], seed)

    def _ids(self, epoch: int, low: int, high: int) -> Ids:
        at, begin, ids = self._window
        if at != epoch or low < begin or high > begin + len(ids):
            # Several steps at once: the permutation is vectorised, and a call has a fixed cost.
            ids = self._order_of(epoch).ids(epoch, low, min(max(high, low + _AHEAD), self._length(epoch)))
            at = epoch
            begin = low
            self._window = (at, begin, ids)
        return ids[low - begin : high - begin]


def changes(before: Cursor, now: Cursor) -> list[str]:
    """What has changed between two runs over the same data, in words."""
    told = []
    for name in ("samples", "seed", "shuffle"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            told.append(f"{name} was {old} and is {new}: epoch {before.epoch} goes on in another order")
    if before.batch != now.batch:
        told.append(
            f"global_batch was {before.batch} and is {now.batch}: epoch {before.epoch} goes on from sample "
            f"{before.position} in batches of the new size"
        )
    return told
