"""What samples draw for an augmentation: a function of the sample's key and the augmentation's name, of nothing else.

Numbers come from a counter and a mixing function in place of a generator with a state, so that those of all samples of
a batch are computed at once, and each is the same in whatever batch its sample is. Only integer operations and exact
scaling are used for them: a vectorised sine may round its last elements in another way than the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal import seeds
from shoal.partition.cuts import Ids

Words = npt.NDArray[np.uint64]


class SampleDraws:
    """Draws of some samples for one augmentation of a chain.

    >>> keys = keys_of(np.array([7, 8, 9]), samples=10, seed=0, epoch=1)
    >>> together = SampleDraws(keys, "flip", 0).uniform(2)
    >>> alone = SampleDraws(keys[1:2], "flip", 0).uniform(2)
    >>> torch.equal(together[1:2], alone), torch.equal(together, SampleDraws(keys, "flip", 1).uniform(2))
    (True, False)
    """

    def __init__(self, keys: Words, name: str, number: int) -> None:
        """`number`: how often the chain has had this name before."""
        salt = np.uint64(seeds.derive(0, "augment", name, number))
        self._keys: Words = mixed(keys ^ salt)

    def __len__(self) -> int:
        return len(self._keys)

    def uniform(self, count: int) -> torch.Tensor:
        """So many numbers of [0, 1) for each sample, a row each; the first ones do not depend on how many."""
        counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        words = mixed(self._keys[:, None] + counters[None, :])
        return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def chosen(self, p: float) -> torch.Tensor:
        """Whether each sample is one of a share p of all."""
        return self.uniform(1)[:, 0] < p

    def symmetric(self, count: int, limit: float) -> torch.Tensor:
        """So many numbers of [-limit, limit) for each sample."""
        return (self.uniform(count) * 2.0 - 1.0) * limit

    def generators(self) -> Iterator[np.random.Generator]:
        """One of numpy's for each sample, for what is drawn one after the other."""
        for key in self._keys.tolist():
            yield np.random.Generator(np.random.Philox(key=key))


def keys_of(tickets: Ids, samples: int, seed: int, epoch: int) -> Words:
    """The key of each sample in an epoch. A ticket beyond the number of samples is one that comes again."""
    keys = [seeds.sample_key(seed, epoch, t % samples, t // samples) for t in tickets.tolist()]
    return np.array(keys, dtype=np.uint64)


def partners(tickets: Ids, key: int) -> Ids:
    """For each sample of a global batch another one of it; which one depends on the set, not on its order.

    >>> a = partners(np.array([4, 9, 2]), key=5)
    >>> b = partners(np.array([9, 2, 4]), key=5)
    >>> dict(zip([4, 9, 2], a.tolist())) == dict(zip([9, 2, 4], b.tolist())), sorted(a.tolist())
    (True, [2, 4, 9])
    """
    words = mixed(tickets.astype(np.uint64) ^ np.uint64(key))
    order = np.lexsort(
        (tickets, words)
    )  # a ring in an order at random: each has one partner, and is one of one
    found = np.empty_like(tickets)
    found[order] = tickets[np.roll(order, -1)]
    return found


def partners_among(wanted: Ids, tickets: Ids, key: int) -> Ids:
    """The partners of some of a global batch's samples."""
    by_ticket = np.argsort(tickets)
    return partners(tickets, key)[by_ticket[np.searchsorted(tickets, wanted, sorter=by_ticket)]]


def rows_of(tickets: Ids, others: Ids) -> tuple[Ids, Ids]:
    """Samples to fetch for a micro-batch and its partners, own ones first; and in which row each partner is.

    >>> rows_of(np.array([3, 5]), np.array([5, 8]))
    (array([3, 5, 8]), array([1, 2]))
    """
    further = np.array(sorted(set(others.tolist()) - set(tickets.tolist())), dtype=np.int64)
    every = np.concatenate([tickets, further])
    place = {ticket: row for row, ticket in enumerate(every.tolist())}
    return every, np.array([place[ticket] for ticket in others.tolist()], dtype=np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(words: Words) -> Words:
    """Each word mixed so that every bit depends on all of it: the finaliser of splitmix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def per_row(values: Sequence[float] | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One number a sample, in the rows' dtype and shaped to be computed with them."""
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.float64, device="cpu")
    dtype = rows.dtype if rows.is_floating_point() else torch.float32
    return values.to(dtype).reshape(-1, *[1] * (rows.dim() - 1))
