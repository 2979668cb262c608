"""The columns of a store, over all of its files: many rows at once, whichever files they are in.

All files are mapped into one address space, so a row of any file is an address. A column is seen as one long tensor
from its lowest address on, of which only the mapped parts are ever touched, and rows anywhere in it are one
`index_select`: as fast for a hundred files as for one. Bounds are checked before, where samples are numbered.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.store.arrow import ArrowType, ColumnKind, kind_of
from shoal.data.store.mapping import memory_at
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids

ArrowArray = Any
"""pyarrow.Array"""
Fill = bool | int | float | str | bytes


class Located(NamedTuple):
    """Rows, by the file that each is in and its number there."""

    files: Ids
    rows: Ids


class Column(ABC):
    """One column over all files."""

    def __init__(self, name: str, arrays: Sequence[ArrowArray], fill: Fill | None) -> None:
        self.name = name
        self._fill = fill
        self.nulls = sum(array.null_count for array in arrays)
        self._valid = _Bits([array.buffers()[0] for array in arrays]) if self.nulls else None

    @abstractmethod
    def gather(self, where: Located) -> torch.Tensor | list[Any]:
        """The values of rows: one tensor, or a list where they are no numbers or differ in length."""

    @abstractmethod
    def keys(self, where: Located) -> npt.NDArray[Any]:
        """One value a row to divide samples by: the value, or the length of a list."""

    def missing(self, where: Located) -> torch.Tensor | None:
        """Which rows are null; None if none of the column is."""
        return None if self._valid is None else ~self._valid.at(where)

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


class _Span:
    """Elements of one type in several files, as if they lay in one tensor."""

    def __init__(
        self, addresses: Sequence[int], counts: Sequence[int], dtype: torch.dtype, width: int
    ) -> None:
        """`counts`: rows that each file has; `width`: elements in a row."""
        size = dtype.itemsize
        base = min(addresses)
        ends = [address + count * width * size for address, count in zip(addresses, counts, strict=True)]
        elements = max((max(ends) - base) // size, width, 1)
        whole = memory_at(base, elements, dtype)
        # Rows begin at every element, and overlap: files need not lie a multiple of a row apart.
        self._rows = torch.as_strided(whole, (elements - width + 1, width), (1, 1)) if width > 1 else whole
        self._flat = whole
        self.starts = (np.array(addresses, dtype=np.int64) - base) // size
        self._one = len(addresses) == 1
        self._width = width

    def take(self, files: Ids, rows: Ids) -> torch.Tensor:
        at = rows * self._width if self._width > 1 else rows
        if not self._one:
            at = at + self.starts[files]
        return self._rows.index_select(0, torch.from_numpy(at))

    def slice(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Elements in a row of their own; nothing is copied."""
        begin = int(self.starts[file])
        return self._flat[begin + start : begin + stop]


class _Bits:
    """Arrow's bitmaps: of null, and of bool."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._all = np.array([buffer is None for buffer in buffers])  # no bitmap: every row is valid
        given = [buffer for buffer in buffers if buffer is not None]
        addresses = [buffer.address if buffer is not None else given[0].address for buffer in buffers]
        counts = [buffer.size if buffer is not None else 0 for buffer in buffers]
        self._bytes = _Span(addresses, counts, torch.uint8, 1)

    def at(self, where: Located) -> torch.Tensor:
        without = torch.from_numpy(self._all[where.files])
        rows = np.where(self._all[where.files], 0, where.rows)
        found = self._bytes.take(where.files, rows >> 3) >> torch.from_numpy((rows & 7).astype(np.uint8))
        return (found & 1).bool() | without


class Numbers(Column):
    """Numbers of one shape in every row."""

    def __init__(
        self, name: str, arrays: Sequence[ArrowArray], kind: ColumnKind, fill: Fill | None = None
    ) -> None:
        super().__init__(name, arrays, fill)
        assert kind.dtype is not None
        self._shape = kind.shape
        width = prod(kind.shape)
        addresses = [array.buffers()[-1].address for array in arrays]
        self._span = _Span(addresses, [len(array) for array in arrays], kind.dtype, width)
        self._length = len(arrays[0]) if len(arrays) == 1 else None
        self._dtype = kind.dtype

    def gather(self, where: Located) -> torch.Tensor:
        """The values of rows, one tensor."""
        found = self._span.take(where.files, where.rows)
        if len(self._shape) > 1:
            found = found.view(-1, *self._shape)
        missing = self.missing(where)
        if missing is not None and missing.any():
            nan = self._dtype.is_floating_point and self._fill is None
            found[missing] = torch.nan if nan else self.number()
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

    def __init__(self, name: str, arrays: Sequence[ArrowArray], fill: Fill | None = None) -> None:
        super().__init__(name, arrays, fill)
        self._bits = _Bits([array.buffers()[1] for array in arrays])

    def gather(self, where: Located) -> torch.Tensor:
        """The values of rows, one tensor."""
        found = self._bits.at(where)
        missing = self.missing(where)
        if missing is not None and missing.any():
            found[missing] = bool(self.number())
        return found

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The value."""
        return self.gather(where).numpy()


class _Offsets:
    """Where each row of varying length begins and ends."""

    def __init__(self, arrays: Sequence[ArrowArray]) -> None:
        addresses = [array.buffers()[1].address for array in arrays]
        self._span = _Span(addresses, [len(array) + 1 for array in arrays], torch.int32, 1)

    def at(self, where: Located) -> tuple[Ids, Ids]:
        begins = self._span.take(where.files, where.rows).numpy().astype(np.int64)
        ends = self._span.take(where.files, where.rows + 1).numpy().astype(np.int64)
        return begins, ends

    def of(self, file: int, rows: int) -> npt.NDArray[np.int32]:
        """All offsets of one file."""
        found: npt.NDArray[np.int32] = self._span.slice(file, 0, rows + 1).numpy()
        return found


class Lists(Column):
    """As many numbers as there are, such as tokens."""

    def __init__(
        self, name: str, arrays: Sequence[ArrowArray], kind: ColumnKind, pad: float | None, uniform: bool
    ) -> None:
        """`pad`: what makes rows of a batch equally long; `uniform`: they all are."""
        super().__init__(name, arrays, None)
        assert kind.dtype is not None
        self.offsets = _Offsets(arrays)
        values = [array.values for array in arrays]
        addresses = [part.buffers()[-1].address if len(part) else 0 for part in values]
        real = [address for address in addresses if address]
        counts = [len(part) for part in values]
        self._span = _Span([a or (real or [_NOTHING])[0] for a in addresses], counts, kind.dtype, 1)
        self.values_in_files = counts
        self.dtype = kind.dtype
        self._pad = pad
        self._uniform = uniform

    def gather(self, where: Located) -> torch.Tensor:
        """One row each, filled up with `pad` to the longest."""
        if self._pad is None and not self._uniform:
            raise ConfigError(
                f"column '{self.name}' has rows of unequal length; give pad={{'{self.name}': 0}}, or collate=, or pack "
                f"it: PackedTokens(store, '{self.name}', length=1024)."
            )
        begins, ends = self.offsets.at(where)
        lengths = ends - begins
        longest = int(lengths.max(initial=0))
        flat = self._flat(where.files, begins, lengths)
        if self._uniform:
            return flat.view(len(lengths), longest)
        assert self._pad is not None
        padded = torch.full((len(lengths), longest), self._pad, dtype=self.dtype, device="cpu")
        padded[torch.from_numpy(np.arange(longest) < lengths[:, None])] = flat
        return padded

    def rows(self, where: Located) -> list[torch.Tensor]:
        """One tensor a row, each a copy."""
        begins, ends = self.offsets.at(where)
        flat = self._flat(where.files, begins, ends - begins)
        return list(torch.split(flat, (ends - begins).tolist()))

    def piece(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Values of one file, whichever rows they are of; nothing is copied."""
        return self._span.slice(file, start, stop)

    def keys(self, where: Located) -> npt.NDArray[Any]:
        """The length."""
        begins, ends = self.offsets.at(where)
        return ends - begins

    def _flat(self, files: Ids, begins: Ids, lengths: Ids) -> torch.Tensor:
        if not len(lengths):
            return torch.empty(0, dtype=self.dtype, device="cpu")
        places = zip(files.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True)
        return torch.cat([self._span.slice(*place) for place in places])


class Texts(Column):
    """Text, or bytes: lists of Python objects."""

    def __init__(
        self, name: str, arrays: Sequence[ArrowArray], decode: bool, fill: Fill | None = None
    ) -> None:
        super().__init__(name, arrays, fill)
        self.offsets = _Offsets(arrays)
        buffers = [array.buffers()[2] for array in arrays]
        self._starts = np.array([_NOTHING if one is None else one.address for one in buffers], dtype=np.int64)
        self._decode = decode

    def gather(self, where: Located) -> list[Any]:
        """The values of rows."""
        begins, ends = self.offsets.at(where)
        addresses = (begins + self._starts[where.files]).tolist()
        read = ctypes.string_at
        found: list[Any] = [read(a, n) for a, n in zip(addresses, (ends - begins).tolist(), strict=True)]
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


_ROOM = (ctypes.c_ubyte * 64)()
_NOTHING = -(-ctypes.addressof(_ROOM) // 16) * 16
"""An address that may be looked at, for columns without a single value."""


def make_column(
    name: str,
    found: ArrowType,
    arrays: Sequence[ArrowArray],
    fill: Fill | None = None,
    pad: float | None = None,
    uniform: bool = False,
) -> Column:
    """The column of a type over the arrays of all files."""
    kind = kind_of(name, found)
    if kind.kind == "numbers":
        return Numbers(name, arrays, kind, fill)
    if kind.kind == "bool":
        return Bools(name, arrays, fill)
    if kind.kind == "list":
        return Lists(name, arrays, kind, pad, uniform)
    return Texts(name, arrays, kind.kind == "text", fill)


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
