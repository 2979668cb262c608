"""The one global order of samples, computed where it is needed and stored nowhere.

Position p of epoch e holds a sample id that is a function of (seed, epoch, p) alone. Workers divide
positions among themselves, so the same samples meet the same step at any world size and after any crash,
and a run resumes in the middle of an epoch without replaying its beginning.

The function is a keyed Feistel network. A position is cut into a high and a low half; each round mixes a
keyed hash of one half into the other. Whatever the hash, a round can be undone, so the whole is a
permutation. Its domain is slightly larger than the number of samples: a result beyond the last sample is
fed through again until it falls inside ("cycle walking"), which keeps it a permutation. Very small data
sets have too few bits to mix, so there the samples are sorted by a keyed hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.seeds import derive

Shuffle = bool | str
"""Whether samples are shuffled; or "blocks(65536)", "blocks(65536, window=8)"."""
Words = npt.NDArray[np.uint32]
"""One half of each number of a block."""

# Part of the order: changing one of these changes every shuffled run, and tests/unit/test_order.py says so.
_ROUNDS = 8
_MULTIPLIER = np.uint32(0x9E3779B1)
_SORT_BELOW = 1024

# Not part of the order: the scratch arrays and the ids of one block fit the second-level cache.
_BLOCK = 32768

_MOST_SAMPLES = 2**62


@dataclass(frozen=True)
class GlobalOrder:
    """The order in which `num_samples` samples are visited, epoch by epoch.

    >>> order = GlobalOrder(num_samples=1_000_000_000, seed=0)
    >>> order.ids(epoch=0, start=500_000_000, stop=500_000_004)
    array([569229625,  45521494, 774213923, 327315831])
    >>> GlobalOrder(num_samples=5, seed=0, shuffle=False).ids(epoch=3, start=1, stop=4)
    array([1, 2, 3])
    """

    num_samples: int
    seed: int
    shuffle: bool = True
    """False gives every epoch the order of the data set itself."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= _MOST_SAMPLES:
            raise ConfigError(
                f"an order needs between 1 and 2**62 samples; this data set has {self.num_samples}. "
                "Check that len() of the data set is right."
            )

    def name(self, epoch: int) -> Shuffle:
        """What a cursor keeps of it."""
        del epoch
        return self.shuffle

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The sample ids at positions [start, stop) of an epoch. Costs the same anywhere in the epoch.

        >>> order = GlobalOrder(num_samples=10, seed=0)
        >>> sorted(order.ids(epoch=0, start=0, stop=10).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> order.ids(epoch=0, start=8, stop=11)
        Traceback (most recent call last):
        shoal.errors.ConfigError: positions [8, 11) do not lie in an epoch of 10 samples.
        """
        if epoch < 0:
            raise ConfigError(f"epochs are counted from 0; there is no epoch {epoch}.")
        if not 0 <= start <= stop <= self.num_samples:
            raise ConfigError(
                f"positions [{start}, {stop}) do not lie in an epoch of {self.num_samples} samples."
            )
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.num_samples <= _SORT_BELOW:
            # So few that sorting is cheap; Feistel networks over tiny domains are visibly not random.
            return shuffled(self.num_samples, derive(self.seed, "order", epoch))[start:stop]
        keys = [derive(self.seed, "order", epoch, number) for number in range(_ROUNDS)]
        # A block cipher over positions: any part of the shuffle at any place, without a table of all samples.
        network = _Feistel(self.num_samples, keys, min(_BLOCK, stop - start))
        found = np.arange(start, stop, dtype=np.int64)
        for first in range(0, len(found), _BLOCK):
            network.permute_below(self.num_samples, found[first : first + _BLOCK])
        return found


@dataclass(frozen=True)
class BlockOrder:
    """Blocks of neighbours in random order, and the samples of `window` blocks mixed: few places are read at a time.

    Reading from spinning disks and from URLs likes that. It is less random than `GlobalOrder`: the samples of a block
    meet within one window of each epoch, `rows` × `window` samples long. Each epoch cuts the blocks at other places.

    >>> order = BlockOrder(num_samples=12, seed=0, rows=3, window=2)
    >>> order.ids(epoch=0, start=0, stop=12)
    array([ 5, 11,  0, 10,  4,  6,  1,  7,  8,  3,  9,  2])
    >>> BlockOrder(1_000_000_000, 0, rows=65536).ids(epoch=7, start=500_000_000, stop=500_000_002)
    array([895362527, 242442236])
    """

    num_samples: int
    seed: int
    rows: int
    """In a block; the last of an epoch may be shorter."""
    window: int = 16
    """Blocks whose samples are mixed."""
    shuffle: ClassVar[bool] = True

    def name(self, epoch: int) -> str:
        """What a cursor keeps of it."""
        del epoch
        return f"blocks({self.rows}, window={self.window})"

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The sample ids at positions [start, stop) of an epoch."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ConfigError(
                f"positions [{start}, {stop}) do not lie in an epoch of {self.num_samples} samples."
            )
        span = self.rows * self.window
        windows = range(start // span, -(-stop // span))
        found = [
            self._window(epoch, number, max(start - number * span, 0), stop - number * span)
            for number in windows
        ]
        if not found:
            return np.empty(0, dtype=np.int64)
        first = derive(self.seed, "first block", epoch) % self.num_samples
        return (np.concatenate(found) + first) % self.num_samples

    def _window(self, epoch: int, number: int, start: int, stop: int) -> Ids:
        """Samples [start, stop) of a window, as if the first block of the epoch began with sample 0."""
        begin = number * self.rows * self.window
        size = min(self.rows * self.window, self.num_samples - begin)
        mixed = GlobalOrder(size, derive(self.seed, "window of blocks", number)).ids(
            epoch, start, min(stop, size)
        )
        slots, inside = np.divmod(mixed, self.rows)
        full = self.num_samples // self.rows
        first = number * self.window
        order = GlobalOrder(max(full, 1), derive(self.seed, "blocks"))
        blocks = order.ids(epoch, min(first, full), min(first + self.window, full)) if full else slots[:0]
        blocks = np.append(blocks, full)  # what is left over behind the full blocks comes last
        return blocks[slots] * self.rows + inside


@dataclass(frozen=True)
class ArrivingOrder:
    """The order of samples that come in parts: the first epoch takes part after part, each shuffled in itself.

    >>> order = ArrivingOrder(GlobalOrder(7, seed=0), rows=3)
    >>> order.ids(epoch=0, start=0, stop=7)
    array([0, 2, 1, 3, 4, 5, 6])
    """

    later: GlobalOrder | BlockOrder
    """The order of all other epochs."""
    rows: int
    """In a part; the last may be shorter."""

    @property
    def num_samples(self) -> int:
        """Of each epoch."""
        return self.later.num_samples

    @property
    def seed(self) -> int:
        """Of both orders."""
        return self.later.seed

    @property
    def shuffle(self) -> bool:
        """Whether samples are mixed at all."""
        return bool(self.later.shuffle)

    def name(self, epoch: int) -> Shuffle:
        """What a cursor keeps of it."""
        return self.later.name(epoch) if epoch else f"parts({self.rows})"

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The sample ids at positions [start, stop) of an epoch."""
        if epoch > 0 or not self.shuffle or not 0 <= start < stop <= self.num_samples:
            return self.later.ids(epoch, start, stop)
        found = []
        for part in range(start // self.rows, -(-stop // self.rows)):
            begin = part * self.rows
            size = min(self.rows, self.num_samples - begin)
            order = GlobalOrder(size, derive(self.seed, "part", part))
            found.append(order.ids(0, max(start - begin, 0), min(stop - begin, size)) + begin)
        return np.concatenate(found)


@dataclass(frozen=True)
class _Blocks:
    """The options of shuffle="blocks(…)"."""

    rows: int
    window: int = 16


def make_order(
    num_samples: int, seed: int, shuffle: Shuffle, arrives: int = 0
) -> GlobalOrder | BlockOrder | ArrivingOrder:
    """The order that `shuffle` asks for. `arrives`: samples come in parts of so many; 0: all are there.

    >>> make_order(100, 0, "blocks(8, window=2)")
    BlockOrder(num_samples=100, seed=0, rows=8, window=2)
    >>> make_order(100, 0, "block(8)")
    Traceback (most recent call last):
    shoal.errors.ConfigError: shuffle='block(8)'; it is True, False, or "blocks(65536)": so many neighbours in a block.
    """
    order: GlobalOrder | BlockOrder = GlobalOrder(num_samples, seed, shuffle is not False)
    if isinstance(shuffle, str):
        choice = parse_choice(shuffle, "shuffle") if shuffle else None
        if choice is None or choice.name != "blocks":
            raise ConfigError(
                f'shuffle={shuffle!r}; it is True, False, or "blocks(65536)": so many neighbours in a block.'
            )
        options = fill_options(choice, _Blocks)
        if options.rows < 1 or options.window < 1:
            raise ConfigError(f"shuffle={shuffle!r}: a block has at least one row, and a window one block.")
        order = BlockOrder(num_samples, seed, options.rows, options.window)
    return ArrivingOrder(order, arrives) if arrives and shuffle is not False else order


class _Feistel:
    """A keyed permutation of at least `count` numbers, with scratch space for `capacity` of them."""

    def __init__(self, count: int, keys: list[int], capacity: int) -> None:
        self._low_bits = (count - 1).bit_length() // 2
        # The low half is a number of bits, the high half a number below a limit: so cut, the domain exceeds
        # the count by less than one low half, and hardly any value has to walk.
        self._high_limit = np.uint32(((count - 1) >> self._low_bits) + 1)
        # An odd multiplier loses no information; the addend moves zero, which a product leaves in place.
        self._keys = [(np.uint32(key >> 31 | 1), np.uint32(key & 0xFFFFFFFF)) for key in keys]
        self._scratch = np.empty((4, capacity), dtype=np.uint32)
        self._wide = np.empty(capacity, dtype=np.uint64)

    def permute_below(self, limit: int, values: Ids) -> None:
        """Replace each value, all of them below `limit`, by its image under the permutation of [0, limit)."""
        self._permute(values)
        # Cycle walking (Black, Rogaway 2002): apply the permutation of the larger domain until the image is inside. It
        # stays a permutation.
        outside = np.flatnonzero(values >= limit)
        while len(outside):
            walked = values[outside]
            self._permute(walked)
            values[outside] = walked
            outside = outside[walked >= limit]

    def _permute(self, values: Ids) -> None:
        high, low, hashed, spare = self._scratch[:, : len(values)]
        np.right_shift(values, self._low_bits, out=high, casting="unsafe")
        np.bitwise_and(values, (1 << self._low_bits) - 1, out=low, casting="unsafe")
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                _hash(low, key, hashed, spare)
                self._add_to_high(high, hashed, spare)
            else:
                _hash(high, key, hashed, spare)
                # The top bits of a product depend on all bits below them; the bottom bits do not.
                np.right_shift(hashed, np.uint32(32 - self._low_bits), out=hashed)
                np.bitwise_xor(low, hashed, out=low)
        np.copyto(values, high)
        np.left_shift(values, self._low_bits, out=values)
        np.bitwise_or(values, low, out=values)

    def _add_to_high(self, high: Words, hashed: Words, spare: Words) -> None:
        """high = (high + hashed scaled to the limit) modulo the limit, without a division."""
        wide = self._wide[: len(high)]
        np.copyto(wide, hashed)
        np.multiply(wide, np.uint64(self._high_limit), out=wide)
        np.right_shift(wide, np.uint64(32), out=wide)
        np.copyto(hashed, wide, casting="unsafe")
        np.add(high, hashed, out=high)
        # Below the limit the difference wraps around to a large number, so the smaller one is the remainder.
        np.subtract(high, self._high_limit, out=spare)
        np.minimum(high, spare, out=high)


def _hash(source: Words, key: tuple[np.uint32, np.uint32], out: Words, spare: Words) -> None:
    """A keyed hash of each word into `out`: two multiplications with a fold between them."""
    multiplier, addend = key
    np.multiply(source, multiplier, out=out)
    np.add(out, addend, out=out)
    np.right_shift(out, np.uint32(16), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, _MULTIPLIER, out=out)


def shuffled(count: int, key: int) -> Ids:
    """The numbers below `count` sorted by a splitmix64 stream from `key`: all orders are equally likely."""
    hashed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(hashed ^ (hashed >> np.uint64(31)), kind="stable").astype(np.int64)
