"""Where a store lies. `LocalPlace` is a folder on a disk; other places keep the same promises.

Files of data are named by what is in them; a version's manifest is created all at once and never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from shoal.data.store.manifest import BLOCK, StoreFile, is_data_name, version_of
from shoal.sealed import read_file, write_file

DATA = "data"
"""The folder of the files, beside the manifests."""
STAGE = ".build-"
"""The beginning of the names of folders in which versions are being built."""


class Place(Protocol):
    """Where a store lies."""

    title: str

    def versions(self) -> list[int]:
        """Those that have a manifest, in order."""

    def read(self, name: str) -> bytes:
        """A manifest; FileNotFoundError if it is not there."""

    def create(self, name: str, text: bytes) -> None:
        """A manifest, whole or not at all; FileExistsError if there is one of that name."""

    def remove(self, name: str) -> None:
        """Remove a manifest, or a file as `data/<name>`."""

    def bring_in(self, written: Path, name: str) -> None:
        """Make a finished file one of the data; the same file may be there already."""

    def data_files(self) -> dict[str, int]:
        """The files of the data, and how many bytes each has."""

    def blocks(self, file: StoreFile) -> Iterator[bytes]:
        """All of a file, block by block; FileNotFoundError if it is not there."""

    def stage(self, name: str) -> Path:
        """A folder on a disk of this host, in which the build `name` may be found again."""

    def stages(self) -> list[Path]:
        """The folders of builds that are not finished."""


class LocalPlace:
    """A folder on a disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.title = str(folder)

    def versions(self) -> list[int]:
        """Those that have a manifest, in order."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found for name in names if (found := version_of(name)) is not None)

    def read(self, name: str) -> bytes:
        """A manifest; FileNotFoundError if it is not there."""
        return read_file(self.folder / name)

    def create(self, name: str, text: bytes) -> None:
        """A manifest, whole or not at all; FileExistsError if there is one of that name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        written = self.folder / f".{name}.{os.getpid()}"
        write_file(written, [text])
        try:
            os.link(written, self.folder / name)  # refuses to replace, as a rename would not
        finally:
            written.unlink()
        flush_folder(self.folder)

    def remove(self, name: str) -> None:
        """Remove a manifest, or a file as `data/<name>`."""
        (self.folder / name).unlink(missing_ok=True)

    def bring_in(self, written: Path, name: str) -> None:
        """Make a finished file one of the data; the same file may be there already."""
        data = self.folder / DATA
        data.mkdir(parents=True, exist_ok=True)
        os.replace(written, data / name)
        flush_folder(data)

    def data_files(self) -> dict[str, int]:
        """The files of the data, and how many bytes each has."""
        data = self.folder / DATA
        if not data.is_dir():
            return {}
        return {entry.name: entry.stat().st_size for entry in os.scandir(data) if is_data_name(entry.name)}

    def local(self, file: StoreFile) -> Path:
        """The file on a disk of this host, to be mapped."""
        return self.folder / DATA / file.name

    def blocks(self, file: StoreFile) -> Iterator[bytes]:
        """All of a file, block by block; FileNotFoundError if it is not there."""
        with open(self.local(file), "rb") as found:
            while block := found.read(BLOCK):
                yield block

    def stage(self, name: str) -> Path:
        """A folder on a disk of this host, in which the build `name` may be found again."""
        return self.folder / f"{STAGE}{name}"

    def stages(self) -> list[Path]:
        """The folders of builds that are not finished."""
        return sorted(self.folder.glob(f"{STAGE}*")) if self.folder.is_dir() else []


def flush_folder(folder: Path) -> None:
    """See the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
