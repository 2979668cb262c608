"""Numbers that processes of one host hand to each other without copying them: memory under no name.

Who owns a `Slab` tells others where it is (`Where`), and they look at it through `Opened`. A path such as
`/proc/7/fd/3` means something on its own host only, and on another it may even name another slab: tell it only to
processes whose `shoal.world.shm.memory.host_key` is the same.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections import OrderedDict

import torch

from shoal.server.protocol.messages import Where
from shoal.world.shm.memory import (
    SEALS,
    SharedMemoryUnavailable,
    SharedRegion,
    make_memory,
    map_memory,
    open_memory,
)

_PAGE = 4096
_KEPT = 1024
"""Mappings that are kept open; each costs the system an entry, and no more memory than its owner holds."""


class Slab:
    """Memory of this process that others of its host can map, zero at first."""

    def __init__(self, nbytes: int) -> None:
        """Rounded up to whole pages. Raises `SharedMemoryUnavailable` where there is no such memory."""
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        try:
            fd = make_memory("slab", self.nbytes, self.nbytes)
            # Others come in through the descriptor: it stays open for as long as this object lives.
            self._shut = weakref.finalize(self, os.close, fd)
            self._region = SharedRegion(map_memory(fd, self.nbytes, self.nbytes))
        except (OSError, OverflowError) as error:
            raise SharedMemoryUnavailable(f"{self.nbytes / 1e6:.1f} MB: {error}") from None
        self._path = f"/proc/{os.getpid()}/fd/{fd}"

    def tensor(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """A flat tensor of `count` elements from byte `offset` on; others see what is written."""
        return self._region.tensor(dtype, offset, count)

    def where(self, dtype: torch.dtype, offset: int, count: int) -> Where:
        """What to tell others of the tensor that `tensor` gives."""
        if not self._shut.alive or not _fits(offset, count, dtype, self.nbytes):
            raise ValueError(f"no tensor here: {count} elements of {dtype} at byte {offset} of {self.nbytes}")
        return Where(self._path, offset, count, dtype)

    def words(self, offset: int, count: int) -> memoryview:
        """`count` unsigned 64-bit words from byte `offset` on; each is read or written in one access."""
        return self._region.words(offset, count)

    def close(self) -> None:
        """Give it up. Nobody new can map it; who has it mapped keeps it, and so do tensors over it."""
        self._shut()
        self._region.close()


class Opened:
    """Slabs of other processes, mapped when they are first looked at and kept."""

    def __init__(self, most: int = _KEPT) -> None:
        """`most`: how many are kept; the one not looked at for the longest time goes first."""
        self._most = most
        self._kept: OrderedDict[str, tuple[tuple[int, int], SharedRegion]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def tensor(self, where: Where) -> torch.Tensor | None:
        """The tensor that another process spoke of, to read and write; None if it cannot be seen from here.

        Whose process has ended is not seen any more. Tensors that were given out stay what they are.
        """
        region = self._region(where.path)
        if region is None or not _fits(where.offset, where.count, where.dtype, region.nbytes):
            return None
        return region.tensor(where.dtype, where.offset, where.count)

    def forget(self, path: str) -> None:
        """Let go of a slab that nobody speaks of again."""
        self._drop(path)

    def close(self) -> None:
        """Let go of everything."""
        for path in list(self._kept):
            self._drop(path)

    def _region(self, path: str) -> SharedRegion | None:
        """A process that ended leaves its number, and so its path, to another: the file behind it tells them apart."""
        try:
            facts = os.stat(path)
            known = self._kept.get(path)
            if known is not None and known[0] == (facts.st_dev, facts.st_ino):
                self._kept.move_to_end(path)
                return known[1]
            self._drop(path)
            return self._open(path)
        except (OSError, ValueError):
            self._drop(path)
            return None

    def _open(self, path: str) -> SharedRegion:
        fd = open_memory(path)
        try:
            # Reading a mapping past the end of a file that was cut short raises SIGBUS. The seals forbid the owner to
            # shrink it.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise OSError(f"{path} could be cut short, which would kill whoever reads it")
            facts = os.fstat(fd)
            region = SharedRegion(map_memory(fd, facts.st_size, facts.st_size))
        finally:
            os.close(fd)
        self._prune()
        self._kept[path] = ((facts.st_dev, facts.st_ino), region)
        return region

    def _prune(self) -> None:
        """Let go of what is gone, so that the memory of processes that ended is free again; then of the oldest."""
        for path, (key, _) in list(self._kept.items()):
            try:
                facts = os.stat(path)
                gone = key != (facts.st_dev, facts.st_ino)
            except OSError:
                gone = True
            if gone:
                self._drop(path)
        while len(self._kept) >= self._most:
            self._drop(next(iter(self._kept)))

    def _drop(self, path: str) -> None:
        if path in self._kept:
            self._kept.pop(path)[1].close()


def _fits(offset: int, count: int, dtype: torch.dtype, nbytes: int) -> bool:
    inside = offset >= 0 and count >= 0 and offset + count * dtype.itemsize <= nbytes
    return inside and offset % dtype.itemsize == 0
