"""A store at a URL: S3, HDFS, and whatever else fsspec can reach.

Files go up under a name of their own and are whole when they have their own; the manifest goes last. On the way back
they come block by block into a cache on this host (`pages.py` beside this).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from shoal.data.store.manifest import BLOCK, StoreFile, is_data_name, version_of
from shoal.data.store.places.place import DATA, STAGE
from shoal.errors import ConfigError
from shoal.urls import FileSystem, last_name, open_url, reason, title_of, try_again

T = TypeVar("T")

_WHOLE_AT_ONCE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory")
"""Schemes under which a file appears when all of it is there."""


class RemotePlace:
    """A folder at a URL."""

    def __init__(self, url: str, cache: Path, waits: tuple[float, ...] = (0.2, 1.0, 4.0)) -> None:
        """`cache`: a folder on this host. `waits`: seconds before each new try after a failure that may pass."""
        self.title = title_of(url)
        self._url = url
        self._cache = cache
        self._waits = waits
        self._scheme = url.partition("://")[0]
        self._opened: tuple[int, FileSystem, str] | None = None
        self._open()

    def versions(self) -> list[int]:
        """Those that have a manifest, in order."""
        return sorted(n for name in self._names("") if (n := version_of(name)) is not None)

    def read(self, name: str) -> bytes:
        """A manifest; FileNotFoundError if it is not there."""
        with self._or_say("read"):
            return self._try(lambda: self._files.cat_file(self._at(name)))

    def create(self, name: str, text: bytes) -> None:
        """A manifest, whole or not at all; FileExistsError if there is one of that name."""
        if name in self._names(""):
            raise FileExistsError(name)
        with self._or_say("written to"):
            if self._scheme in _WHOLE_AT_ONCE:
                self._try(lambda: self._files.pipe_file(self._at(name), text))
                return
            part = self._at(f".{name}.{os.getpid()}")
            self._try(lambda: self._files.pipe_file(part, text))
            self._try(lambda: self._files.mv(part, self._at(name)))

    def remove(self, name: str) -> None:
        """Remove a manifest, or a file as `data/<name>`."""
        with self._or_say("written to"), suppress(FileNotFoundError):
            self._try(lambda: self._files.rm_file(self._at(name)))

    def bring_in(self, written: Path, name: str) -> None:
        """Make a finished file one of the data; the same file may be there already."""
        target = self._at(DATA, name)
        with self._or_say("written to"):
            if self._size(target) != written.stat().st_size:
                part = target if self._scheme in _WHOLE_AT_ONCE else self._at(DATA, f".{name}.{os.getpid()}")
                self._try(lambda: self._files.put_file(str(written), part))
                if part != target:
                    with suppress(
                        FileNotFoundError
                    ):  # cut short, by a system that shows files while they grow
                        self._files.rm_file(target)
                    self._try(lambda: self._files.mv(part, target))
        written.unlink()

    def data_files(self) -> dict[str, int]:
        """The files of the data, and how many bytes each has."""
        return {name: size for name, size in self._names(DATA).items() if is_data_name(name)}

    def blocks(self, file: StoreFile) -> Iterator[bytes]:
        """All of a file, block by block; FileNotFoundError if it is not there."""
        if self._size(self._at(DATA, file.name)) < 0:
            raise FileNotFoundError(file.name)
        for start in range(0, file.bytes, BLOCK):
            yield self.fetch(file, start, min(start + BLOCK, file.bytes))

    def fetch(self, file: StoreFile, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""
        try:
            with self._or_say("read"):
                return self._try(
                    lambda: self._files.cat_file(self._at(DATA, file.name), start=start, end=stop)
                )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.title}/data/{file.name} is missing, and the manifest of its store names it; restore it."
            ) from error

    def stage(self, name: str) -> Path:
        """A folder on a disk of this host, in which the build `name` may be found again."""
        key = hashlib.sha256(self.title.encode()).hexdigest()[:16]
        return self._cache / "builds" / key / f"{STAGE}{name}"

    def stages(self) -> list[Path]:
        """The folders of builds that are not finished."""
        folder = self.stage("").parent
        return sorted(folder.glob(f"{STAGE}*")) if folder.is_dir() else []

    @property
    def _files(self) -> FileSystem:
        return self._open()[0]

    def _open(self) -> tuple[FileSystem, str]:
        """A file system of this process: those that work in threads do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            files, path = open_url(self._url, self.title, shared=True)
            self._opened = (os.getpid(), files, path.rstrip("/"))
        return self._opened[1], self._opened[2]

    def _names(self, folder: str) -> dict[str, int]:
        """Names in a folder, and how many bytes each has."""
        files, path = self._open()
        with self._or_say("listed"):
            files.invalidate_cache()
            try:
                entries = self._try(lambda: files.ls(f"{path}/{folder}".rstrip("/"), True))
            except FileNotFoundError:
                return {}
        return {last_name(entry["name"]): int(entry.get("size") or 0) for entry in entries}

    def _size(self, path: str) -> int:
        self._files.invalidate_cache()
        try:
            return int(self._files.info(path).get("size") or 0)
        except FileNotFoundError:
            return -1

    def _at(self, *names: str) -> str:
        return "/".join([self._open()[1], *names])

    def _try(self, action: Callable[[], T]) -> T:
        return try_again(action, self._waits)

    @contextmanager
    def _or_say(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (ConfigError, FileNotFoundError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.title} cannot be {verb} ({reason(error)}); check the address, the credentials and the network."
            ) from error
