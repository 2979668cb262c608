"""Files of a remote store on a disk of this host, brought block by block when a row in them is asked for.

    cache/<key of the URL>/lock                        held shared by every process that reads the store
    cache/<key of the URL>/<name>.arrow                as long as the remote file, with holes
    cache/<key of the URL>/<name>.arrow.blocks         one byte a block: whether it is here

All processes of a host share what any of them has brought. Each checks a block against the manifest when it first
touches it, whoever brought it; what does not match is brought again, and named if that does not help. Stores that
nobody reads are removed, the longest unused first, when the room is needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from shoal.data.store.manifest import BLOCK, StoreFile
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids

Fetch = Callable[[StoreFile, int, int], bytes]
"""Bytes [start, stop) of a file, from where the store lies."""

_LOCK = "lock"
_AT_ONCE = 8
"""Blocks that are on their way together."""


@dataclass(frozen=True)
class Cache:
    """A folder for remote stores, with a limit."""

    folder: Path
    limit: int
    """Bytes, of all stores together."""

    def hold(self, url: str, wanted: int) -> Path:
        """The folder of a store, kept from being removed while this process lives; room for it is made."""
        if wanted > self.limit:
            raise ConfigError(
                f"{url} has {wanted / 1e9:.1f} GB and its cache in {self.folder} may hold {self.limit / 1e9:.1f} GB; "
                "give Store(…, cache_limit=…) more, or copy the store to a disk with shoal data copy."
            )
        mine = self.folder / hashlib.sha256(url.encode()).hexdigest()[:16]
        mine.mkdir(parents=True, exist_ok=True)
        # Never closed: the kernel lets the lock go when the last process that reads the store ends.
        held = os.open(mine / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(held, fcntl.LOCK_SH)
        os.utime(mine / _LOCK)
        self._make_room(mine, wanted)
        return mine

    def _make_room(self, mine: Path, wanted: int) -> None:
        others = sorted((one for one in self.folder.iterdir() if one != mine), key=_last_use)
        sizes = {one: _bytes_on_disk(one) for one in others}
        left = wanted + sum(sizes.values())
        for one in others:
            if left <= self.limit:
                return
            if _remove_unused(one):
                left -= sizes[one]


def _last_use(folder: Path) -> float:
    try:
        return (folder / _LOCK).stat().st_mtime
    except OSError:
        return 0.0


def _bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.is_dir() else 0


def _remove_unused(folder: Path) -> bool:
    try:
        with open(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            return True
    except OSError:  # somebody reads it, or it is none of ours
        return False


class Pages:
    """Which blocks of a store's files this process has seen whole, and how the others come."""

    def __init__(self, folder: Path, files: Sequence[StoreFile], fetch: Fetch, title: str) -> None:
        self._files = list(files)
        self._fetch = fetch
        self._title = title
        self.paths = [folder / file.name for file in files]
        for path, file in zip(self.paths, files, strict=True):
            _make_hollow(path, file.bytes)
            _make_hollow(_flags(path), -(-file.bytes // BLOCK))
        counts = [-(-file.bytes // BLOCK) for file in files]
        ends = np.cumsum([0, *counts])
        self._starts = np.array([begin for begin, _ in pairwise(ends.tolist())], dtype=np.int64)
        self._have = np.zeros(int(ends[-1]), dtype=bool)
        self.complete = False
        """Whether nothing can be missing any more: then nobody has to ask."""

    def need(self, files: Ids, begins: Ids, ends: Ids) -> None:
        """See to it that bytes [begin, end) of files can be read from memory."""
        first = self._starts[files] + begins // BLOCK
        last = self._starts[files] + np.maximum(ends - 1, begins) // BLOCK
        if self._have[first].all() and (first == last).all():
            return
        wanted = np.unique(np.concatenate([first, last, *_between(first, last)]))
        missing = wanted[~self._have[wanted]]
        if len(missing):
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._bring, missing.tolist()))
            self._have[missing] = True
            self.complete = bool(self._have.all())

    def need_ends(self) -> None:
        """What Arrow reads of every file: its first and its last block."""
        files = np.arange(len(self._files))
        sizes = np.array([file.bytes for file in self._files], dtype=np.int64)
        for offset in (np.zeros_like(sizes), sizes - 1, np.maximum(sizes - 64 * 1024, 0)):
            self.need(files, offset, offset + 1)

    def need_all(self, file: int) -> None:
        """Every block of a file."""
        self.need(np.array([file]), np.array([0]), np.array([self._files[file].bytes]))

    def _bring(self, number: int) -> None:
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        file, path = self._files[place], self.paths[place]
        block = number - int(self._starts[place])
        start, stop = block * BLOCK, min((block + 1) * BLOCK, file.bytes)
        with open(_flags(path), "r+b", buffering=0) as flags, open(path, "r+b", buffering=0) as out:
            # One process brings a block, the others wait for it.
            fcntl.lockf(flags, fcntl.LOCK_EX, 1, block)
            here = os.pread(flags.fileno(), 1, block) == b"\1"
            if here and _sum(os.pread(out.fileno(), stop - start, start)) == _wanted(file, block):
                return
            found = self._fetch(file, start, stop)
            if _sum(found) != _wanted(file, block):
                found = self._fetch(file, start, stop)  # perhaps it was damaged on its way
            if _sum(found) != _wanted(file, block):
                raise ConfigError(
                    f"{self._title}/data/{file.name} is damaged in bytes {start} to {stop}; restore it, or build the "
                    "store again."
                )
            os.pwrite(out.fileno(), found, start)
            os.pwrite(flags.fileno(), b"\1", block)


def _between(first: Ids, last: Ids) -> list[Ids]:
    """Blocks that lie inside of long rows."""
    return [np.arange(a + 1, b) for a, b in zip(first.tolist(), last.tolist(), strict=True) if b > a + 1]


def _flags(path: Path) -> Path:
    return path.with_name(f"{path.name}.blocks")


def _make_hollow(path: Path, size: int) -> None:
    """A file of a size, without bytes in it where there are none."""
    with open(path, "ab") as out:
        if out.tell() != size:
            os.truncate(path, size)


def _sum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _wanted(file: StoreFile, block: int) -> str:
    return file.blocks[16 * block : 16 * block + 16]
