"""Memory that the workers of one host hold in common, under no name.

Rank 0 makes an anonymous file in memory (memfd), reserves it, and tells the others through the
store where the kernel shows that file: `/proc/<pid>/fd/<fd>`. They open and map it; once all have, rank 0
closes the descriptor. So nothing ever appears in /dev/shm, the small /dev/shm of containers does not matter,
and the kernel frees the memory with the last process, however it ended.

Creation is all or nothing. Whoever fails says so through the store, and every rank raises the same
`SharedMemoryUnavailable`, so that callers can turn to something else together.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
from pathlib import Path

import psutil
import torch

from shoal.torch_private import Store

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of <linux/mman.h>, which Python does not name yet."""
_ALIGNMENT = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals under which the size of memory cannot change any more."""
_SAID_YES = "yes"
_MEMCPY = ctypes.CDLL(None).memcpy
_MEMCPY.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MEMCPY.restype = None


class SharedMemoryUnavailable(Exception):
    """The ranks cannot all map one region. Every rank of the group raises it, with the same text."""


class SharedRegion:
    """One mapping of `nbytes` bytes, zero at first, shared by all ranks that made it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.nbytes = len(mapping)

    @classmethod
    def create(
        cls, store: Store, name: str, rank: int, size: int, nbytes: int, seldom: int = 0
    ) -> SharedRegion:
        """Make a region together; all ranks pass the same `name`, new in `store`, and `nbytes`.

        The last `seldom` bytes take memory only when they are first used.
        """
        nbytes = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        if rank == 0:
            return cls._lead(store, name, size, nbytes, nbytes - seldom)
        return cls._follow(store, name, rank, nbytes, nbytes - seldom)

    @classmethod
    def _lead(cls, store: Store, name: str, size: int, nbytes: int, at_once: int) -> SharedRegion:
        fd = -1
        answers = [_SAID_YES]
        region = None
        try:
            fd = make_memory(name, nbytes, at_once)
            region = cls(map_memory(fd, nbytes, at_once))
            store.set(f"{name}/path", f"/proc/{os.getpid()}/fd/{fd}")
        except OSError as error:
            answers = [f"{nbytes / 1e6:.1f} MB on rank 0: {error}"]
            store.set(f"{name}/path", "")
        try:
            # All or none: a rank without the region would wait for rounds that others publish in it.
            answers += [store.get(f"{name}/answer{peer}").decode() for peer in range(1, size)]
        finally:
            if fd >= 0:
                os.close(fd)
        verdict = next((answer for answer in answers if answer != _SAID_YES), _SAID_YES)
        store.set(f"{name}/verdict", verdict)
        return _agreed(region, verdict)

    @classmethod
    def _follow(cls, store: Store, name: str, rank: int, nbytes: int, at_once: int) -> SharedRegion:
        answer = _SAID_YES
        region = None
        path = store.get(f"{name}/path").decode()
        try:
            if path:  # empty: rank 0 has failed already and its reason will come with the verdict
                fd = open_memory(path)
                try:
                    region = cls(map_memory(fd, nbytes, at_once))
                finally:
                    os.close(fd)
        except OSError as error:
            answer = f"{nbytes / 1e6:.1f} MB on rank {rank}: {error}"
        store.set(f"{name}/answer{rank}", answer)
        return _agreed(region, store.get(f"{name}/verdict").decode())

    def tensor(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """A flat tensor of `count` elements from byte `offset` on; all ranks see what is written."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # torch keeps the object it was given, but does not tell it so: without the view, `close` would unmap.
        return torch.frombuffer(memoryview(self._open), dtype=dtype, count=count, offset=offset)

    def words(self, offset: int, count: int) -> memoryview:
        """`count` unsigned 64-bit words from `offset` on; each is read or written in one access."""
        return memoryview(self._open)[offset : offset + 8 * count].cast("Q")

    def close(self) -> None:
        """Give up this rank's hold. The memory goes when no tensor of any rank refers to it any more."""
        mapping = self._mapping
        self._mapping = None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # tensors over it still live: the last of them unmaps it
                mapping.close()

    @property
    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError("this shared region is closed")
        return self._mapping


def make_memory(name: str, nbytes: int, at_once: int) -> int:
    """A descriptor of new memory under no name, zero, of a size that nobody can change any more."""
    free = psutil.virtual_memory().available
    if at_once > free:  # the kernel would not say no: it would kill processes until there is enough
        raise OSError(errno.ENOMEM, f"{at_once / 1e6:.1f} MB are wanted and {free / 1e6:.1f} MB are free")
    fd = os.memfd_create(f"shoal-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # Reserving now turns a lack of memory into an error; a sparse file would kill us at first touch.
        os.posix_fallocate(fd, 0, at_once)
        # Whoever maps it has seen its size once; were it cut short later, touching the rest would kill him.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(path: str) -> int:
    """Open what another process named, if it is such memory: whoever reaches us could name any file of ours."""
    if re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", path) and os.readlink(path).startswith("/memfd:shoal"):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    raise OSError(f"{path} is not shared memory of this job")


def host_key(name: str = "") -> str:
    """A text that is equal in two processes exactly if they can share memory.

    `name` overrides what the machine says: workers started with different names count as different hosts.
    Two network or process namespaces are two hosts, because `/proc/<pid>` of one means nothing in the other.
    """
    parts = [name or socket.gethostname(), os.uname().machine]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    # Containers of one machine share boot id and perhaps host name, but not the namespaces that memory is found by.
    for space in ("net", "pid", "ipc"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
    return " ".join(parts)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bytes of a contiguous tensor to the start of another.

    libc writes whole cache lines without reading them first, which torch's copy does not: a quarter less time
    where the lines were last used by another core.
    """
    _MEMCPY(target.data_ptr(), source.data_ptr(), min(source.nbytes, target.nbytes))


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a flat tensor into another of its size: as bytes where both are plain memory with the same numbers."""
    plain = source.device.type == target.device.type == "cpu" and source.dtype == target.dtype
    if plain and source.is_contiguous() and target.is_contiguous():
        copy(target, source)
    else:
        target.copy_(source)


def map_memory(fd: int, nbytes: int, at_once: int) -> mmap.mmap:
    """Map memory for reading and writing, and bring in its first `at_once` bytes."""
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    # Populating now takes the page faults out of the first collective; kernels before 5.14 cannot do it.
    with contextlib.suppress(OSError):
        mapping.madvise(_POPULATE_WRITE, 0, at_once)
    return mapping


def _agreed(region: SharedRegion | None, verdict: str) -> SharedRegion:
    if verdict == _SAID_YES and region is not None:
        return region
    if region is not None:
        region.close()
    raise SharedMemoryUnavailable(verdict)
