"""One file of a checkpoint: a safetensors file that any safetensors reader opens.

Written and read by hand, because a shard is one block of memory that is written as it lies, checked slice by slice,
and read in ranges without a copy of what is not wanted (docs/decisions/0016).

    8 bytes     length of the header
    header      JSON: name -> dtype, shape, place
    data        one tensor after the other, without gaps
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.sealed import checksum, open_plain, writing
from shoal.sealed import write_file as write_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_type(name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that no file can hold."""
    if dtype not in NAMES:
        formats = ", ".join(str(known).removeprefix("torch.") for known in NAMES)
        raise ConfigError(
            f"'{name}' is of {str(dtype).removeprefix('torch.')}, which a checkpoint cannot hold; "
            f"convert it to one of {formats}."
        )


@dataclass(frozen=True)
class Slot:
    """A tensor in a file, and where its bytes are in the data."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def place(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[Slot]:
    """Give each tensor its place in the data, in the order given."""
    slots = []
    end = 0
    for key, dtype, shape in tensors:
        size = dtype.itemsize
        for length in shape:
            size *= length
        slots.append(Slot(key, dtype, shape, end, end + size))
        end += size
    return slots


PAGE = 4096
"""Bytes: what goes past the page cache begins and ends at multiples of it, in memory and in the file."""


def head(slots: Sequence[Slot], align: int = 8) -> bytes:
    """What stands before the data, as long as a multiple of `align`.

    >>> len(head(place([("weight", torch.float32, (4, 3))]), align=PAGE))
    4096
    """
    entries = {
        slot.key: {
            "dtype": NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.stop],
        }
        for slot in slots
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    return len(text).to_bytes(8, "little") + text


_CHUNK = 8 * 2**20
"""Bytes per call: other threads, and the training, get their turn in between."""


def write_block(path: Path, block: memoryview) -> None:
    """Write one block of memory, past the page cache where that can be done, and see it on the disk.

    The cache would cost a copy of every byte, and once more time when the file is removed: time of the training.
    """
    with writing(path) as descriptor:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        done = 0
        # Some file systems cannot; and memory that begins anywhere cannot be written so.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            while done < len(block) // PAGE * PAGE:
                done += os.write(descriptor, block[done : min(done + _CHUNK, len(block) // PAGE * PAGE)])
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        while done < len(block):
            done += os.write(descriptor, block[done : done + _CHUNK])
        os.fsync(descriptor)


class ShardFile:
    """A file open for reading. Its bytes are mapped: only what is looked at is read."""

    def __init__(self, path: Path) -> None:
        self._file = open(open_plain(path), "rb")  # noqa: SIM115 it stays open as long as the map
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        # A private map: torch takes no memory that cannot be written to, and nothing written would reach the file.
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        # The disk may read far ahead: what is looked at page by page would come in small pieces.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._map.madvise(mmap.MADV_SEQUENTIAL)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = size
        length = int.from_bytes(self._map[:8], "little")
        if length > size - 8:
            raise ValueError(f"its header claims {length} of its {size} bytes")
        self.begin = 8 + length
        """Where the data begins."""

    def header(self) -> dict[str, Slot]:
        """What the file says it holds; ValueError where that is not to be believed."""
        entries = json.loads(self._map[8 : self.begin])
        slots = {}
        for key, entry in entries.items():
            if key == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            slot = Slot(key, DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
            expected = place([(key, slot.dtype, slot.shape)])[0].stop
            if stop - start != expected or not 0 <= start <= stop <= self.size - self.begin:
                raise ValueError(f"'{key}' does not fit its place")
            slots[key] = slot
        return slots

    def head_checksum(self) -> str:
        """Of everything before the data."""
        return checksum(memoryview(self._map)[: self.begin])

    def checksum(self, slot: Slot) -> str:
        """Of one tensor's bytes."""
        return checksum(memoryview(self._map)[self.begin + slot.start : self.begin + slot.stop])

    def read(self, slot: Slot) -> torch.Tensor:
        """One tensor, flat, where it lies in the file: not to be written to."""
        data = self._bytes[self.begin + slot.start : self.begin + slot.stop]
        aligned = data if data.data_ptr() % slot.dtype.itemsize == 0 else data.clone()
        return aligned.view(slot.dtype)

    def close(self) -> None:
        """The map itself goes when no tensor looks into it any more."""
        self._file.close()
