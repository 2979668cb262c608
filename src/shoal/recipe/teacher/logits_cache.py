"""Logits of a teacher on disk: what it said of a sample, so that it need not run again for it.

A sample is known by a checksum of its inputs, not by its number: an augmented sample is another one, and is not
found. Each worker appends to a file of its own and reads those of all; a file begins with one line of JSON, and each
record has a checksum. What is cut off or damaged is not used, and computed again.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import xxhash
from torch import nn

from shoal.data.batch import Batch, length, tensors_of
from shoal.errors import ConfigError

_HEAD = struct.Struct("<16sQI4x")
"""A record's key, the checksum of its bytes, and how many dimensions follow."""
_FORMAT = "shoal logits 1"


class LogitsCache:
    """Records of one teacher in one folder, shared by all workers that see it."""

    def __init__(self, folder: str, teacher: str, dtype: torch.dtype, rank: int) -> None:
        """`teacher`: a checksum of its weights."""
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._title = {"format": _FORMAT, "teacher": teacher, "dtype": str(dtype).removeprefix("torch.")}
        self._dtype = dtype
        self._index: dict[bytes, tuple[Path, int, tuple[int, ...], int]] = {}
        self._read: dict[Path, int] = {}
        self._own = self._folder / f"rank-{rank:05}-{os.urandom(6).hex()}.logits"
        self._out: BinaryIO | None = None
        self.hits = 0
        self.misses = 0
        self._look()

    def find(self, keys: list[bytes]) -> torch.Tensor | None:
        """The logits of these samples; None unless all are here."""
        if not all(key in self._index for key in keys):
            self._look()  # other workers have written since
        if not all(key in self._index for key in keys):
            self.misses += len(keys)
            return None
        rows = [self._record(key) for key in keys]
        found = [row for row in rows if row is not None]
        if len(found) < len(keys) or len({row.shape for row in found}) > 1:
            self.misses += len(keys)
            return None
        self.hits += len(keys)
        return torch.stack(found)

    def keep(self, keys: list[bytes], logits: torch.Tensor) -> None:
        """Write down what the teacher said of these samples."""
        out = self._out or self._begin()
        rows = logits.detach().to(device="cpu", dtype=self._dtype).contiguous()
        for key, row in zip(keys, rows, strict=True):
            if key in self._index:
                continue
            data = row.reshape(-1).view(torch.uint8).numpy().tobytes()
            shape = tuple(row.shape)
            head = _HEAD.pack(key, xxhash.xxh3_64_intdigest(data), len(shape))
            head += struct.pack(f"<{len(shape)}Q", *shape)
            self._index[key] = (self._own, out.tell() + len(head), shape, xxhash.xxh3_64_intdigest(data))
            out.write(head + data)
        out.flush()
        self._read[self._own] = out.tell()

    def _begin(self) -> BinaryIO:
        self._out = self._own.open("xb")
        self._out.write(json.dumps(self._title).encode() + b"\n")
        return self._out

    def _look(self) -> None:
        for file in sorted(self._folder.glob("rank-*.logits")):
            if file != self._own:
                self._scan(file)

    def _scan(self, file: Path) -> None:
        """Take up the records of a file from where the last look ended."""
        with file.open("rb") as stream:
            line = stream.readline(4096)
            if not line.endswith(b"\n"):
                return  # just begun
            self._check(file, line)
            size = file.stat().st_size
            stream.seek(self._read.get(file, stream.tell()))
            while True:
                at = stream.tell()
                record = self._next(stream, size)
                if record is None:
                    self._read[file] = at
                    return
                key, shape, checksum = record
                self._index.setdefault(key, (file, stream.tell(), shape, checksum))
                stream.seek(self._nbytes(shape), os.SEEK_CUR)

    def _next(self, stream: BinaryIO, size: int) -> tuple[bytes, tuple[int, ...], int] | None:
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        key, checksum, dims = _HEAD.unpack(head)
        if dims > 8:
            return None
        words = stream.read(8 * dims)
        if len(words) < 8 * dims:
            return None
        shape = struct.unpack(f"<{dims}Q", words)
        return (key, shape, checksum) if stream.tell() + self._nbytes(shape) <= size else None

    def _check(self, file: Path, line: bytes) -> None:
        try:
            title = json.loads(line)
        except ValueError:
            title = {}
        if title != self._title:
            raise ConfigError(
                f"distil: {file} holds logits of another teacher, or in another dtype; give cache= another folder, or "
                "remove this one."
            )

    def _record(self, key: bytes) -> torch.Tensor | None:
        file, at, shape, checksum = self._index[key]
        with file.open("rb") as stream:
            stream.seek(at)
            data = stream.read(self._nbytes(shape))
        if xxhash.xxh3_64_intdigest(data) != checksum:
            del self._index[key]
            return None
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._dtype).reshape(shape)

    def _nbytes(self, shape: tuple[int, ...]) -> int:
        total = self._dtype.itemsize
        for size in shape:
            total *= size
        return total


def keys_of_rows(batch: Batch) -> list[bytes]:
    """A checksum of each sample of a batch: of its row in every tensor that has one."""
    rows = length(batch)
    parts = []
    for tensor in tensors_of(batch):
        if tensor.dim() and len(tensor) == rows:
            flat = tensor.detach().cpu().contiguous().reshape(rows, -1)
            parts.append(flat.view(torch.uint8).numpy().reshape(rows, -1))
    together = np.ascontiguousarray(np.concatenate(parts, axis=1))
    shape = str([tuple(tensor.shape[1:]) for tensor in tensors_of(batch)]).encode()
    return [xxhash.xxh3_128_digest(row.tobytes() + shape) for row in together]


def checksum_of(teacher: nn.Module) -> str:
    """One of all its weights."""
    whole = xxhash.xxh3_128()
    for name, tensor in teacher.state_dict().items():
        whole.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            whole.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return whole.hexdigest()
