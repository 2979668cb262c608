"""New data with a share of old samples among them, so that a model does not forget what it knew.

An epoch is every new sample once, and as many old ones as make up the share, at places at random. Old samples are
drawn without repetition: none comes twice before all have come once, over epochs too. With a share of 0 old samples
are not trained on at all.

When to use: data that arrives over time, where training on all of it anew would cost too much.
Robins, "Catastrophic forgetting, rehearsal and pseudorehearsal", Connection Science 1995; Rolnick et al., "Experience
replay for continual learning", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch.utils.data import ConcatDataset

from shoal.data.feed import Feed
from shoal.data.order import GlobalOrder
from shoal.data.source import is_stream
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.recipe.contract import Recipe, Running, RunView
from shoal.seeds import derive


@dataclass(frozen=True)
class Replay(Recipe):
    """`replay(0.2)` with `data=[old, new]`: a fifth of the samples are old ones. With one data set that has grown,
    `replay(0.2, old=60000)`: its first 60,000 are the old ones."""

    summary: ClassVar[str] = "train on new data with a share of old samples among them"
    share: float = 0.2
    old: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or self.old < 0:
            raise ConfigError(
                f"replay: share={self.share:g}, old={self.old}; a share is from 0 to below 1, and old= a number of "
                "samples."
            )

    def run(self, view: RunView) -> Running:
        """All is in the order of samples."""
        del view
        return Running()

    def feed(self, feed: Feed) -> Feed:
        """The same data in this order."""
        if feed.sampler is not None:
            raise ConfigError(
                "replay gives the order of samples, and so does sampler=; leave one of them out."
            )
        data, old = feed.data, self.old
        if not old:
            if not (
                isinstance(data, list | tuple) and len(data) == 2 and all(hasattr(d, "__len__") for d in data)
            ):
                raise ConfigError(
                    "replay: give data=[old, new], or one data set and how many of its first samples are old, as in "
                    "replay(0.2, old=60000)."
                )
            old = len(data[0])
            data = ConcatDataset(list(data))
        if is_stream(data) or not old < len(data):
            size = "a stream" if is_stream(data) else f"{len(data)} samples"
            raise ConfigError(
                f"replay: {old} samples are old and data= is {size}; there must be new ones behind the old."
            )
        order = ReplayOrder(old, len(data) - old, self.share, feed.seed)
        return replace(feed, data=data, sampler=order)


class ReplayOrder:
    """A sampler: the numbers of an epoch's samples.

    >>> order = ReplayOrder(old=10, new=6, share=0.25, seed=0)
    >>> epoch = list(order)
    >>> len(epoch), sorted(i for i in epoch if i >= 10), len({i for i in epoch if i < 10})
    (8, [10, 11, 12, 13, 14, 15], 2)
    """

    def __init__(self, old: int, new: int, share: float, seed: int) -> None:
        self.old = old
        self.new = new
        self.replayed = round(new * share / (1 - share))
        """Old samples in an epoch."""
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.new + self.replayed

    def __iter__(self) -> Iterator[int]:
        fresh = GlobalOrder(self.new, derive(self._seed, "replay", "new"), shuffle=True)
        new = fresh.ids(self._epoch, 0, self.new) + self.old
        both = np.concatenate([new, self._old_ones()])
        mixed = GlobalOrder(len(both), derive(self._seed, "replay", "mixed"), shuffle=True)
        return iter(both[mixed.ids(self._epoch, 0, len(both))].tolist())

    def _old_ones(self) -> Ids:
        """The next ones of an endless row of shuffles of all old samples."""
        order = GlobalOrder(self.old, derive(self._seed, "replay", "old"), shuffle=True)
        found = []
        at, left = self._epoch * self.replayed, self.replayed
        while left:
            turn, place = divmod(at, self.old)
            some = order.ids(turn, place, min(place + left, self.old))
            found.append(some)
            at += len(some)
            left -= len(some)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
