"""What a torch DataLoader says about its data, in Shoal's own words. The loader itself is never iterated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shoal.data.batch import Collate
from shoal.data.sampler import SampledOrder, Sampler, layers
from shoal.errors import ConfigError

WorkerInit = Callable[[int], None]


@dataclass(frozen=True)
class LoaderParts:
    """What a DataLoader is made of."""

    data: Any
    batch: int
    """Samples in a batch; in the largest one, where a batch sampler of the user's own makes them."""
    shuffle: bool = False
    sampler: Sampler | None = None
    """The order, or the batches, where it is not that of the data set or one at random."""
    own_batches: bool = False
    """The sampler gives whole batches."""
    drop_last: bool = False
    collate: Collate | None = None
    workers: int = 0
    pin_memory: bool = False
    worker_init: WorkerInit | None = None
    lost: tuple[str, ...] = ()
    """What Shoal does in another way, in words."""


def loader_parts(loader: DataLoader[Any], seed: int) -> LoaderParts:
    """The parts of a DataLoader; refuses what cannot be taken apart.

    >>> parts = loader_parts(DataLoader(range(10), batch_size=4, shuffle=True, drop_last=True), seed=0)
    >>> parts.batch, parts.shuffle, parts.drop_last
    (4, True, True)
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"data= is a {type(loader).__name__}, a DataLoader with an iter() of its own, which Shoal would not call; "
            "do what it does in the data set or in collate_fn=, and give a plain DataLoader."
        )
    data = loader.dataset
    if loader.batch_sampler is None and loader.batch_size is None:
        raise ConfigError(
            "data= is a DataLoader with batch_size=None: what its data set gives may be batches, and Shoal divides "
            "samples; give data=loader.dataset if it gives samples, or a data set that does."
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    lost = _lost(loader)
    if isinstance(data, IterableDataset):
        if loader.num_workers:
            lost.append(f"num_workers={loader.num_workers} (every worker reads the whole stream itself)")
        if loader.drop_last:
            lost.append("drop_last (the last batch of a stream counts, however short)")
        return LoaderParts(data, int(loader.batch_size or 1), collate=collate, lost=tuple(lost))
    order = _order(loader, data, seed, lost)
    return LoaderParts(
        data,
        order.batch,
        order.shuffle,
        order.sampler,
        order.own_batches,
        order.drop_last,
        collate,
        loader.num_workers,
        bool(loader.pin_memory),
        loader.worker_init_fn,
        tuple(lost),
    )


@dataclass(frozen=True)
class _Order:
    batch: int
    drop_last: bool
    shuffle: bool
    sampler: Sampler | None
    own_batches: bool = False


def _order(loader: DataLoader[Any], data: Any, seed: int, lost: list[str]) -> _Order:
    batches: Any = loader.batch_sampler
    _refuse_divided(batches)
    if type(batches) is not BatchSampler:
        order = SampledOrder(batches, len(data), seed)
        if not order.own_batches:
            raise ConfigError(
                f"the batch sampler {type(batches).__name__} gives single numbers; it has to give lists of numbers."
            )
        largest = int(np.diff(order.epoch(0).ends, prepend=0).max())
        return _Order(largest, False, False, batches, own_batches=True)
    sampler: Any = batches.sampler
    plain = len(getattr(sampler, "data_source", ())) == len(data)
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        lost.append("generator (the order follows from seed=)")
    if type(sampler) is SequentialSampler and plain:
        return _Order(batches.batch_size, batches.drop_last, False, None)
    # The plain shuffle is the same as Shoal's, but for its order: take ours, which follows from the seed at any place.
    once = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data)
    if once and plain:
        return _Order(batches.batch_size, batches.drop_last, True, None)
    return _Order(batches.batch_size, batches.drop_last, False, sampler)


def _refuse_divided(sampler: object) -> None:
    """A sampler that gives each process its own part would leave samples out: all processes ask for all of them."""
    divides = [one for one in layers(sampler) if hasattr(one, "num_replicas") and hasattr(one, "rank")]
    if divides:
        raise ConfigError(
            f"data= is a DataLoader with a {type(divides[0]).__name__}, which divides samples among processes, and "
            "Shoal divides every batch itself; leave the sampler out and use DataLoader(shuffle=True)."
        )


def _lost(loader: DataLoader[Any]) -> list[str]:
    """Options that have no meaning here. persistent_workers has: processes live as long as the run."""
    found = []
    if loader.timeout:
        found.append(f"timeout={loader.timeout:g}")
    if loader.num_workers and loader.prefetch_factor not in (None, 2):
        found.append(f"prefetch_factor={loader.prefetch_factor} (2)")
    if loader.num_workers and loader.multiprocessing_context is not None:
        found.append("multiprocessing_context (torch's default)")
    return found
