"""A matrix that grows at its end without moving what it holds.

Its bytes are one array of numpy's, which grows by `realloc`: for large ones the kernel gives the same pages other
addresses, so nothing is copied and at no time do two copies exist. Growth is by an eighth, so little is unused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_FIRST = 256


class GrowingMatrix:
    """`width` numbers of `dtype` for each of many rows, new ones zero."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.dtype = dtype
        self.width = width
        self._bytes = np.zeros(_FIRST * self.row_bytes, dtype=np.uint8)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return self._bytes.nbytes

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        """All rows, [count, width], as a view until the next growth; one that lives then makes growth copy."""
        used = torch.from_numpy(self._bytes)[: self._count * self.row_bytes]
        return used.view(self.dtype).view(self._count, self.width)

    @property
    def array(self) -> npt.NDArray[np.int64]:
        """The rows as a flat array, for a column of whole numbers."""
        made: npt.NDArray[np.int64] = self.tensor.view(-1).numpy()
        return made

    def resize(self, count: int) -> None:
        """Have so many rows; what is new is zero."""
        room = len(self._bytes) // self.row_bytes
        if count > room:
            self._grow(max(count, room + room // 8) * self.row_bytes)
        elif count > self._count:  # rows that were given up are there to be used again
            self._bytes[self._count * self.row_bytes : count * self.row_bytes] = 0
        self._count = count

    def _grow(self, nbytes: int) -> None:
        try:
            self._bytes.resize(nbytes)
        except ValueError:  # somebody looks at the old bytes, so they may not move
            grown = np.zeros(nbytes, dtype=np.uint8)
            grown[: self._bytes.size] = self._bytes
            self._bytes = grown

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of these rows."""
        return self.tensor.index_select(0, slots)

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite these rows; no slot is named twice."""
        self.tensor.index_copy_(0, slots, rows)
