"""The global order, sorted by length in windows: batches of samples of like length, visited in random order.

A window is a stretch of the order, `window` × `grain` samples long. Its samples are sorted by length, cut into batches
of `grain`, and the batches are put in an order that depends on (seed, epoch, number of the window). So the result is a
permutation again, a function of (seed, epoch, position) and the lengths, and reaching any place costs one window.
"""

from __future__ import annotations

import numpy as np

from shoal.data.order import ArrivingOrder, BlockOrder, GlobalOrder, shuffled
from shoal.partition.base import Keys
from shoal.partition.cuts import Ids
from shoal.seeds import derive


class GroupedOrder:
    """An order with the same face as the one that it sorts.

    >>> order = GroupedOrder(GlobalOrder(6, seed=0, shuffle=False), np.array([3, 1, 2, 9, 7, 8]), grain=2, window=3)
    >>> order.ids(epoch=0, start=0, stop=6)
    array([1, 2, 0, 4, 5, 3])
    """

    def __init__(
        self, order: GlobalOrder | BlockOrder | ArrivingOrder, lengths: Keys, grain: int, window: int
    ) -> None:
        """`grain`: samples in a batch; `window`: batches in a window."""
        self._order = order
        self._lengths = lengths
        self.grain = grain
        self.window = window
        self._kept = (-1, -1, np.empty(0, dtype=np.int64))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The sample ids at positions [start, stop) of an epoch."""
        span = self.grain * self.window
        found = []
        for number in range(start // span, -(-stop // span)):
            sorted_ids = self._window(epoch, number)
            found.append(sorted_ids[max(start - number * span, 0) : stop - number * span])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _window(self, epoch: int, number: int) -> Ids:
        if self._kept[:2] != (epoch, number):
            self._kept = (epoch, number, self._sort(epoch, number))
        return self._kept[2]

    def _sort(self, epoch: int, number: int) -> Ids:
        order = self._order
        grain = self.grain
        start = number * grain * self.window
        ids = order.ids(epoch, start, min(start + grain * self.window, order.num_samples))
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        if not order.shuffle:
            return ids
        full, short = divmod(len(ids), grain)
        key = derive(order.seed, "window", epoch, number)
        # The last batch of an epoch may be short, and stays last. Taken from a random place, so that it does not
        # always hold the longest samples.
        place = key % (full + 1) * grain
        last = ids[place : place + short]
        # Sorted by length within the window, batches are then shuffled: padding is small, and lengths do not come in
        # order.
        batches = np.concatenate([ids[:place], ids[place + short :]]).reshape(full, grain)
        return np.concatenate([batches[shuffled(full, key)].reshape(-1), last])
