"""Samples: by number, from anything with len() and [i]; or one after the other, from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.batch import Batch, Collate
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids


class Source(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """Samples in a fixed order, from the beginning each time; how many may be unknown."""

    def __iter__(self) -> Iterator[Any]: ...


def is_stream(data: Source | Stream) -> bool:
    """Whether samples can only be read one after the other."""
    if isinstance(data, IterableDataset):
        return True
    by_number = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return not by_number and hasattr(data, "__iter__") and not hasattr(data, "__next__")


def check_source(data: Source | Stream, global_batch: int) -> None:
    """Refuse what cannot feed a single step."""
    if global_batch < 1:
        raise ConfigError(f"global_batch={global_batch}; it must be at least 1.")
    if is_stream(data):
        return
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data= is a {type(data).__name__}; it needs len() and [i], as a list or a map-style data set has, or it "
            "can be a stream: an object whose iter() begins anew each time."
        )
    samples = len(data)  # type: ignore[arg-type]
    if samples < global_batch:
        raise ConfigError(
            f"the data set has {samples} samples, fewer than one global_batch of {global_batch}; "
            f"use global_batch={max(samples, 1)} or less."
        )


def is_plain(data: Source, collate: Collate | None) -> bool:
    """Whether batches are rows of tensors and nothing of the user's runs to make one."""
    return (
        collate is None
        and isinstance(data, TensorDataset)
        and type(data).__getitem__ is TensorDataset.__getitem__
        and not hasattr(data, "__getitems__")
    )


def fetch(data: Source, ids: Ids, collate: Collate | None) -> Batch:
    """One batch of the given samples."""
    if is_plain(data, collate):
        rows = torch.from_numpy(ids)
        tensors: tuple[torch.Tensor, ...] = data.tensors  # type: ignore[attr-defined]
        return tuple([tensor.index_select(0, rows) for tensor in tensors])  # not a sample at a time
    many = getattr(data, "__getitems__", None)  # torch's own protocol for fetching several samples at once
    samples = many(ids.tolist()) if many is not None else [data[i] for i in ids.tolist()]
    return (collate or default_collate)(samples)
