"""One file of a store in memory: mapped, not read. The kernel brings pages as they are touched, and drops them."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path

import numpy as np
import torch

from shoal.data.store.arrow import RecordBatch, arrow
from shoal.errors import ConfigError

_READ_WRITE = 1 | 2
_PRIVATE_NORESERVE = 0x02 | 0x4000
"""Copy on write: what a program does to a tensor of mapped memory never reaches the file."""


class Mapping:
    """The bytes of a file at an address; no descriptor stays open, so that a store may have any number of files."""

    def __init__(self, path: Path, size: int) -> None:
        """`size`: how many bytes the file has to have."""
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is missing, and the manifest of its store names it; restore it."
            ) from error
        try:
            found = os.fstat(descriptor).st_size
            if found != size or size == 0:
                raise ConfigError(f"{path} has {found} bytes and its manifest says {size}; it is damaged.")
            self.address = _map(descriptor, size)
            self.size = size
        finally:
            os.close(descriptor)
        weakref.finalize(self, _unmap, self.address, size)

    def record_batch(self) -> RecordBatch:
        """The one record batch in the file. Its arrays lie in this mapping, and keep it alive."""
        pa = arrow()
        whole = pa.foreign_buffer(self.address, self.size, base=self)
        try:
            opened = pa.ipc.open_file(pa.BufferReader(whole))
            if opened.num_record_batches != 1:
                raise ValueError(f"{opened.num_record_batches} record batches")
            return opened.get_batch(0)
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}); see shoal data verify.") from error


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(descriptor: int, size: int) -> int:
    address = _libc().mmap(None, size, _READ_WRITE, _PRIVATE_NORESERVE, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _unmap(address: int, size: int) -> None:
    _libc().munmap(address, size)


def memory_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements from an address on, as a tensor. Whoever uses it keeps the mappings below it alive."""
    size = count * dtype.itemsize
    plain = (ctypes.c_ubyte * size).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(plain)).view(dtype)
