"""Samples: by number, from anything with len() and [i]; or one after the other, from a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.batch import Batch, Collate
from shoal.data.draws import own_generators
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids


class Source(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class BatchSource(ABC):
    """A map-style data set that gathers whole batches, and has columns of its own to divide samples by."""

    grows: ClassVar[bool] = False
    """Whether samples are only ever added: the first n stay what they were."""
    arrives: int = 0
    """Samples come in parts of so many while training goes on, and the first epoch takes them in order; 0: all are
    there."""

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __getitem__(self, index: int, /) -> object: ...
    @abstractmethod
    def batch(self, ids: Ids) -> Batch:
        """The batch of some samples."""

    @property
    @abstractmethod
    def whole_batches(self) -> bool:
        """Whether `batch` gives what samples one by one would: nothing of the user's has to see each of them."""

    @property
    def features(self) -> Mapping[str, Any]:
        """Fitted features in it, by name: checkpoints keep them beside what was trained on them."""
        return {}

    @property
    @abstractmethod
    def key_names(self) -> tuple[str, ...]:
        """Columns that a partition may ask for."""

    @abstractmethod
    def keys(self, name: str) -> Any:
        """What stands for an array with one value a sample, and may read it when it is asked."""


class Stream(Protocol):
    """Samples in a fixed order, from the beginning each time; how many may be unknown."""

    def __iter__(self) -> Iterator[Any]: ...


def is_stream(data: Source | Stream) -> bool:
    """Whether samples can only be read one after the other."""
    if isinstance(data, IterableDataset):
        return True
    by_number = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return not by_number and hasattr(data, "__iter__") and not hasattr(data, "__next__")


def check_source(data: Source | Stream, global_batch: int, sampled: bool = False) -> None:
    """Refuse what cannot feed a single step. `sampled`: a sampler says how long an epoch is."""
    if global_batch < 1:
        raise ConfigError(f"global_batch={global_batch}; it must be at least 1.")
    if hasattr(data, "dataset") and hasattr(data, "batch_size") and not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data= is a {type(data).__name__}, which gives batches, and Shoal divides samples; give its data set, or "
            "a torch DataLoader, which Shoal takes apart."
        )
    if is_stream(data):
        return
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data= is a {type(data).__name__}; it needs len() and [i], as a list or a map-style data set has, or it "
            "can be a stream: an object whose iter() begins anew each time."
        )
    samples = len(data)  # type: ignore[arg-type]
    if samples < global_batch and not sampled:
        raise ConfigError(
            f"the data set has {samples} samples, fewer than one global_batch of {global_batch}; "
            f"use global_batch={max(samples, 1)} or less."
        )


def is_plain(data: Source, collate: Collate | None) -> bool:
    """Whether batches are rows of tensors and nothing of the user's runs to make one."""
    if isinstance(data, BatchSource):
        return collate is None and data.whole_batches
    return (
        collate is None
        and isinstance(data, TensorDataset)
        and type(data).__getitem__ is TensorDataset.__getitem__
        and not hasattr(data, "__getitems__")
    )


def fetch(data: Source, ids: Ids, collate: Collate | None) -> Batch:
    """One batch of the given samples."""
    if is_plain(data, collate):
        if isinstance(data, BatchSource):
            return data.batch(ids)
        rows = torch.from_numpy(ids)
        tensors: tuple[torch.Tensor, ...] = data.tensors  # type: ignore[attr-defined]
        return tuple([tensor.index_select(0, rows) for tensor in tensors])  # not a sample at a time
    numbers = ids.tolist()
    return join(fetch_samples(data, numbers), numbers, collate)


def fetch_samples(data: Source, ids: list[int]) -> list[object]:
    """The given samples, through torch's own protocol for fetching several at once where a data set has it."""
    many = getattr(data, "__getitems__", None)
    samples: list[object] = []
    try:
        if many is not None:
            # torch's protocol for data sets that fetch several samples in one go.
            samples = many(ids)
        else:
            for i in ids:  # a list that is half made tells which sample it was
                samples.append(data[i])
    except Exception as error:
        error.add_note(f"shoal: this was in data[{ids[len(samples)]}]." if many is None else _batch_of(ids))
        raise
    return samples


def doubts(data: Source | Stream) -> list[str]:
    """Sentences about what may not be what was meant, as far as a glance at the data tells.

    >>> doubts([(torch.zeros(4, 2), torch.zeros(4)), (torch.zeros(3, 2), torch.zeros(3))])[0][:46]
    'data[0] looks like a batch: its tensors have 4'
    """
    found = []
    held = own_generators(data)
    if held:
        found.append(
            f"{', '.join(held[:4])}: a random generator of the data set's own. What it gives depends on what was "
            "drawn before; draw from torch's, numpy's or Python's global generators, which Shoal keys by sample."
        )
    rows = _rows(data[0]) if isinstance(data, list | tuple) and data else None
    if rows is not None and len(data) > 1:  # type: ignore[arg-type]
        found.append(
            f"data[0] looks like a batch: its tensors have {rows} rows each. Shoal takes it as one sample and makes "
            "batches of such samples itself; give the data set, or a DataLoader."
        )
    return found


def _rows(sample: object) -> int | None:
    """The number of rows, if a sample looks like a batch: several tensors, one of them flat, equally long."""
    parts = list(sample.values()) if isinstance(sample, dict) else sample
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        return None
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    shapes = [tensor.shape for tensor in tensors if tensor.dim() > 0]
    if len(shapes) < len(parts) or len({shape[0] for shape in shapes}) > 1 or shapes[0][0] < 2:
        return None
    dims = {len(shape) for shape in shapes}
    return shapes[0][0] if min(dims) == 1 < max(dims) else None


def join(samples: list[object], numbers: list[int], collate: Collate | None) -> Batch:
    """Samples as one batch; an error says which samples they are."""
    try:
        return (collate or default_collate)(samples)
    except Exception as error:
        error.add_note(_batch_of(numbers))
        raise


def _batch_of(numbers: list[int]) -> str:
    more = ", …" if len(numbers) > 8 else ""
    return f"shoal: this was with the batch of samples {', '.join(map(str, numbers[:8]))}{more}."
