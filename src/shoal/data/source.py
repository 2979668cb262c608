"""Samples by id: from anything with len() and [i]."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.data import TensorDataset, default_collate

from shoal.data.batch import Batch, Collate
from shoal.data.order import Ids
from shoal.errors import ConfigError


class Source(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def check_source(data: Source, global_batch: int) -> None:
    """Refuse what cannot feed a single step."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data= is a {type(data).__name__}; it needs len() and [i], as a list or a map-style data set has."
        )
    if global_batch < 1:
        raise ConfigError(f"global_batch={global_batch}; it must be at least 1.")
    if len(data) < global_batch:
        raise ConfigError(
            f"the data set has {len(data)} samples, fewer than one global_batch of {global_batch}; "
            f"use global_batch={max(len(data), 1)} or less."
        )


def is_plain(data: Source, collate: Collate | None) -> bool:
    """Whether batches are rows of tensors and nothing of the user's runs to make one."""
    return (
        collate is None
        and isinstance(data, TensorDataset)
        and type(data).__getitem__ is TensorDataset.__getitem__
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
