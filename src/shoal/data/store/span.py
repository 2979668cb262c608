"""Bytes of mapped files as tensors: rows anywhere in any file by one `index_select`.

A column is seen as one long tensor from its lowest address on, of which only the mapped parts are ever touched. Bounds
are checked before, where samples are numbered. Of a store at a URL, blocks that are missing are brought first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.store.mapping import memory_at
from shoal.data.store.places.pages import Pages
from shoal.partition.cuts import Ids

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch picks rows of these types only under another name."""
_ROOM = (ctypes.c_ubyte * 64)()
NOTHING = -(-ctypes.addressof(_ROOM) // 16) * 16
"""An address that may be looked at, for columns without a single value."""


class Memory:
    """Mapped files of which some blocks may still be missing."""

    def __init__(self, pages: Pages, addresses: Sequence[int]) -> None:
        """`addresses`: where each file begins."""
        self._pages = pages
        self._addresses = np.array(addresses, dtype=np.int64)

    def need(self, files: Ids, addresses: Ids, sizes: Ids | int) -> None:
        """See to it that so many bytes from these addresses on are there."""
        if not self._pages.complete and len(files):
            begins = addresses - self._addresses[files]
            self._pages.need(files, begins, begins + sizes)


class Span:
    """Elements of one type in several files, as if they lay in one tensor."""

    def __init__(
        self,
        addresses: Sequence[int],
        counts: Sequence[int],
        dtype: torch.dtype,
        width: int = 1,
        memory: Memory | None = None,
    ) -> None:
        """`counts`: rows that each file has; `width`: elements in a row; `memory`: where blocks may be missing."""
        size = dtype.itemsize
        base = min(addresses)
        ends = [address + count * width * size for address, count in zip(addresses, counts, strict=True)]
        elements = max((max(ends) - base) // size, width, 1)
        whole = memory_at(base, elements, dtype)
        # Rows begin at every element, and overlap: files need not lie a multiple of a row apart.
        self._rows = torch.as_strided(whole, (elements - width + 1, width), (1, 1)) if width > 1 else whole
        self._flat = whole
        self._signed = _SIGNED.get(dtype)
        self.starts = (np.array(addresses, dtype=np.int64) - base) // size
        self._one = len(addresses) == 1
        self._memory = memory
        self._base = base
        self._size = size
        self._width = width

    def take(self, files: Ids, rows: Ids) -> torch.Tensor:
        """Rows, as a tensor of their own."""
        at = rows * self._width if self._width > 1 else rows
        if not self._one:
            at = at + self.starts[files]
        if self._memory is not None:
            self._memory.need(files, self._base + at * self._size, self._width * self._size)
        count = len(rows)
        if (
            count > 1
            and rows[-1] - rows[0] == count - 1
            and files[0] == files[-1]
            and (np.diff(rows) == 1).all()
        ):
            # In sequence: one copy, at the speed of memory.
            found = self._flat[int(at[0]) : int(at[0]) + count * self._width].clone()
            return found.view(count, self._width) if self._width > 1 else found
        return self._picked(torch.from_numpy(at))

    def _picked(self, at: torch.Tensor) -> torch.Tensor:
        if self._signed is None:
            return self._rows.index_select(0, at)
        return self._rows.view(self._signed).index_select(0, at).view(self._rows.dtype)

    def slice(self, file: int, start: int, stop: int) -> torch.Tensor:
        """Elements in a row of their own; nothing is copied."""
        begin = int(self.starts[file])
        if self._memory is not None and stop > start:
            low = np.array([self._base + (begin + start) * self._size])
            self._memory.need(np.array([file]), low, (stop - start) * self._size)
        return self._flat[begin + start : begin + stop]


class Bits:
    """Arrow's bitmaps: of null, and of bool."""

    def __init__(self, buffers: Sequence[Any], memory: Memory | None) -> None:
        self._all = np.array([buffer is None for buffer in buffers])  # no bitmap: every row is valid
        given = [buffer for buffer in buffers if buffer is not None]
        addresses = [buffer.address if buffer is not None else given[0].address for buffer in buffers]
        counts = [buffer.size if buffer is not None else 0 for buffer in buffers]
        self._bytes = Span(addresses, counts, torch.uint8, 1, memory)

    def at(self, files: Ids, rows: Ids) -> torch.Tensor:
        """The bits of rows."""
        without = self._all[files]
        rows = np.where(without, 0, rows)
        found = self._bytes.take(files, rows >> 3) >> torch.from_numpy((rows & 7).astype(np.uint8))
        return (found & 1).bool() | torch.from_numpy(without)


class Offsets:
    """Where each row of varying length begins and ends."""

    def __init__(self, arrays: Sequence[Any], memory: Memory | None) -> None:
        addresses = [array.buffers()[1].address for array in arrays]
        self._span = Span(addresses, [len(array) + 1 for array in arrays], torch.int32, 1, memory)

    def at(self, files: Ids, rows: Ids) -> tuple[Ids, Ids]:
        """Of rows."""
        begins = self._span.take(files, rows).numpy().astype(np.int64)
        ends = self._span.take(files, rows + 1).numpy().astype(np.int64)
        return begins, ends

    def of(self, file: int, rows: int) -> npt.NDArray[np.int32]:
        """All offsets of one file."""
        found: npt.NDArray[np.int32] = self._span.slice(file, 0, rows + 1).numpy()
        return found
