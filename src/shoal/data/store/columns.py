"""The columns of a store, over all of its files: many rows at once, whichever files they are in."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.store.arrow import ArrowType, ColumnKind, kind_of
from shoal.data.store.span import NOTHING, Bits, Memory, Offsets, Span
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids

ArrowArray = Any
"""pyarrow.Array"""
Fill = bool | int | float | str | bytes


class Located(NamedTuple):
    """Rows, by the file that each is in and its number there."""

    files: Ids
    rows: Ids


@dataclass(frozen=True)
class ColumnData:
    """What a column is made of, and what stands for what is not there."""

    name: str
    arrays: Sequence[ArrowArray]
    """Of each file."""
    nulls: int
    """How many there are."""
    fill: Fill | None = None
    """What stands for null."""
    pad: float | None = None
    """What makes lists of a batch equally long."""
    uniform: bool = False
    """Whether all lists are."""
    memory: Memory | None = None
    """Where blocks may be missing."""


class Column(ABC):
    """One column over all files."""

    def __init__(self, data: ColumnData) -> None:
        self.name = data.name
        self.nulls = data.nulls
        self._fill = data.fill
        bitmaps = [array.buffers()[0] for array in data.arrays] if data.nulls else []
        self._valid = Bits(bitmaps, data.memory) if bitmaps else None

    @abstractmethod
    def gather(self, where: Located) -> torch.Tensor | list[object]:
        """The values of rows: one tensor, or a list where they are no numbers or differ in length."""

    @abstractmethod
    def keys(self, where: Located) -> npt.NDArray[Any]:
        """One value a row to divide samples by: the value, or the length of a list."""

    def missing(self, where: Located) -> torch.Tensor | None:
        """Which rows are null; None if none of the column is."""
        return None if self._valid is None else ~self._valid.at(where.files, where.rows)

    def filler(self) -> Fill:
        """What stands for null, or a refusal."""
        if self._fill is None:
            raise ConfigError(
                f"column '{self.name}' has {self.nulls} nulls, which no tensor holds; give fill={{'{self.name}': 0}}, "
                "or leave it out with columns=."
            )
        return self._fill

    def number(self) -> float:
        """The same, where only a number can."""
        found = self.filler()
        if isinstance(found, str | bytes):
            raise ConfigError(f"fill= gives column '{self.name}' the text {found!r}, and it holds numbers.")
        return found


class Numbers(Column):
    """Numbers of one shape in every row."""

    def __init__(self, data: ColumnData, kind: ColumnKind) -> None:
        super().__init__(data)
        assert kind.dtype is not None
        self._shape = kind.shape
        addresses = [array.buffers()[-1].address for array in data.arrays]
        counts = [len(array) for array in data.arrays]
        self._span = Span(addresses, counts, kind.dtype, prod(kind.shape), data.memory)
        self._length = counts[0] if len(counts) == 1 else None
        self._dtype = kind.dtype

    def gather(self, where: Located) -> torch.Tensor:
        """The values of rows, one tensor."""
        found = self._span.take(where.files, where.rows)
        if len(self._shape) > 1:
            found = found.view(-1, *self._shape)
        missing = self.missing(where)
        if missing is not None and missing.any():
            nan = self._dtype.is_floating_point and self._fill is None
            # By numpy: torch fills no unsigned numbers.
            found.numpy()[missing.numpy()] = np.nan if nan else self.number()
        return found

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The value."""
        if self._shape:
            raise ConfigError(
                f"column '{self.name}' has {prod(self._shape)} numbers a row; divide by another one."
            )
        return self.gather(where).numpy()

    def whole(self) -> torch.Tensor | None:
        """All rows without a copy; None where there are several files, or nulls."""
        if self._length is None or self.nulls:
            return None
        return self._span.slice(0, 0, self._length * prod(self._shape)).view(self._length, *self._shape)


class Bools(Column):
    """True and false."""

    def __init__(self, data: ColumnData) -> None:
        super().__init__(data)
        self._bits = Bits([array.buffers()[1] for array in data.arrays], data.memory)

    def gather(self, where: Located) -> torch.Tensor:
        """The values of rows, one tensor."""
        found = self._bits.at(where.files, where.rows)
        missing = self.missing(where)
        if missing is not None and missing.any():
            found[missing] = bool(self.number())
        return found

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The value."""
        return self.gather(where).numpy()


class Lists(Column):
    """As many numbers as there are, such as tokens."""

    def __init__(self, data: ColumnData, kind: ColumnKind) -> None:
        super().__init__(replace(data, nulls=0))  # a null list is an empty one
        assert kind.dtype is not None
        self.offsets = Offsets(data.arrays, data.memory)
        values = [array.values for array in data.arrays]
        found = [part.buffers()[-1].address if len(part) else 0 for part in values]
        somewhere = next((address for address in found if address), NOTHING)
        self.values_in_files = [len(part) for part in values]
        addresses = [address or somewhere for address in found]
        self._span = Span(addresses, self.values_in_files, kind.dtype, 1, data.memory)
        self.dtype = kind.dtype
        self._pad = data.pad
        self._uniform = data.uniform

    def gather(self, where: Located) -> torch.Tensor:
        """One row each, filled up with `pad` to the longest."""
        if self._pad is None and not self._uniform:
            raise ConfigError(
                f"column '{self.name}' has rows of unequal length; give pad={{'{self.name}': 0}}, or collate=, or pack "
                f"it: PackedTokens(store, '{self.name}', length=1024)."
            )
        begins, ends = self.offsets.at(where.files, where.rows)
        lengths = ends - begins
        longest = int(lengths.max(initial=0))
        flat = self._flat(where.files, begins, lengths)
        if self._uniform:
            return flat.view(len(lengths), longest)
        assert self._pad is not None
        padded = torch.full((len(lengths), longest), self._pad, dtype=self.dtype, device="cpu")
        padded.numpy()[np.arange(longest) < lengths[:, None]] = flat.numpy()
        return padded

    def rows(self, where: Located) -> list[torch.Tensor]:
        """One tensor a row, each a copy."""
        begins, ends = self.offsets.at(where.files, where.rows)
        flat = self._flat(where.files, begins, ends - begins)
        return list(torch.split(flat, (ends - begins).tolist()))

    def piece(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Values of one file, whichever rows they are of; nothing is copied."""
        return self._span.slice(file, start, stop)

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The length."""
        begins, ends = self.offsets.at(where.files, where.rows)
        return ends - begins

    def _flat(self, files: Ids, begins: Ids, lengths: Ids) -> torch.Tensor:
        if not len(lengths):
            return torch.empty(0, dtype=self.dtype, device="cpu")
        places = zip(files.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True)
        return torch.cat([self._span.slice(*place) for place in places])


class Texts(Column):
    """Text, or bytes: lists of Python objects."""

    def __init__(self, data: ColumnData, decode: bool) -> None:
        super().__init__(data)
        self.offsets = Offsets(data.arrays, data.memory)
        buffers = [array.buffers()[2] for array in data.arrays]
        self._starts = np.array([NOTHING if one is None else one.address for one in buffers], dtype=np.int64)
        self._decode = decode
        self._memory = data.memory
        self._one = (
            data.arrays[0] if len(data.arrays) == 1 and data.memory is None and not data.nulls else None
        )

    def gather(self, where: Located) -> list[object]:
        """The values of rows."""
        if self._one is not None:  # Arrow makes Python objects faster
            values: list[object] = self._one.take(where.rows).to_pylist()
            return values
        begins, ends = self.offsets.at(where.files, where.rows)
        places = begins + self._starts[where.files]
        if self._memory is not None:
            full = ends > begins
            self._memory.need(where.files[full], places[full], (ends - begins)[full])
        read = ctypes.string_at
        found: list[Any] = [
            read(a, n) for a, n in zip(places.tolist(), (ends - begins).tolist(), strict=True)
        ]
        if self._decode:
            found = [str(one, "utf-8") for one in found]
        missing = self.missing(where)
        if missing is not None:
            for place in missing.nonzero().flatten().tolist():
                found[place] = self.filler()
        return found

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The value."""
        array = np.empty(len(where.rows), dtype=object)
        array[:] = self.gather(where)
        return array


def make_column(found: ArrowType, data: ColumnData) -> Column:
    """The column of a type over the arrays of all files."""
    kind = kind_of(data.name, found)
    if kind.kind == "numbers":
        return Numbers(data, kind)
    if kind.kind == "bool":
        return Bools(data)
    return Lists(data, kind) if kind.kind == "list" else Texts(data, decode=kind.kind == "text")


class Keys:
    """A column as the key of a partition: read where it is asked, so that nothing of it is held in memory.

    It stands where an array of keys would stand.
    """

    def __init__(self, column: Column, locate: Any, rows: int) -> None:
        self._column = column
        self._locate = locate
        self.shape = (rows,)
        self.dtype = column.keys(locate(np.zeros(min(rows, 1), dtype=np.int64))).dtype

    def __getitem__(self, ids: Ids) -> npt.NDArray[Any]:
        return self._column.keys(self._locate(ids))


def row_starts(rows: Sequence[int]) -> Ids:
    """The number of the first row of each file.

    >>> row_starts([3, 4]).tolist()
    [0, 3]
    """
    ends = np.cumsum([0, *rows]).tolist()
    return np.array([begin for begin, _ in pairwise(ends)], dtype=np.int64)
