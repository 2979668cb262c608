"""The values of a shard, in memory that workers of the host can read while it is being written.

The first word is a version: odd while values change, and two more after each change. A reader copies what it needs and
looks at the version before and after; if both are the same even number, nothing was torn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from shoal.server.protocol.messages import Where
from shoal.server.transport.slabs import Slab
from shoal.world.shm.memory import SharedMemoryUnavailable

CONTROL = 4096
"""Bytes before the values: a page of its own, so that values begin on one."""


class Values:
    """A flat vector with a version. Where there is no shared memory it is plain, and `where` is None."""

    def __init__(self, size: int, dtype: torch.dtype, version: int = 0) -> None:
        self.version = version
        self.where: Where | None = None
        self._word: memoryview | None = None
        self._slab: Slab | None = None
        try:
            self._slab = Slab(CONTROL + size * dtype.itemsize)
        except SharedMemoryUnavailable:
            self.tensor = torch.zeros(size, dtype=dtype)
            return
        self.tensor = self._slab.tensor(dtype, CONTROL, size)
        self.where = self._slab.where(dtype, CONTROL, size)
        self._word = self._slab.words(0, 1)
        self._word[0] = version

    def fits(self, size: int, dtype: torch.dtype) -> bool:
        return self.tensor.numel() == size and self.tensor.dtype == dtype

    @contextlib.contextmanager
    def writing(self, then: int | None = None) -> Iterator[None]:
        """Values change within; afterwards the version is the next even number, or `then`."""
        if self._word is not None:
            self._word[0] = self.version + 1
        try:
            yield
        finally:
            self.version = self.version + 2 if then is None else then
            if self._word is not None:
                self._word[0] = self.version

    def close(self) -> None:
        """Give the memory up. Who still reads it sees an odd version for ever, and asks again."""
        if self._word is not None:
            self._word[0] = self.version + 1
            self._word.release()
            self._word = None
        if self._slab is not None:
            self._slab.close()
