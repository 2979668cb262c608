"""What a flow reads: which files a URL names, of which kind, and what they were, for the lineage."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from shoal.errors import ConfigError
from shoal.urls import FileSystem, hide, open_url, reason, title_of

KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".csv.gz": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".jsonl.gz": "json",
}
_HASHED = 64 * 2**20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class InputFile:
    """A file that a flow has read."""

    url: str
    bytes: int
    digest: str
    """xxh3 of all of it; of remote files what the file system says of a version, or when they were read."""


@dataclass(frozen=True)
class Inputs:
    """The files that a URL names."""

    url: str
    kind: str
    files: tuple[str, ...]

    def check_alike(self) -> None:
        """Refuse Parquet files of unequal columns: engines take those of the first, each in its own way."""
        if self.kind != "parquet" or len(self.files) == 1 or "://" in self.url:
            return
        from pyarrow import parquet

        first: dict[str, str] = {}
        for file in self.files:
            found = {entry.name: str(entry.type) for entry in parquet.read_schema(file)}
            first = first or found
            for name in (*first, *found):
                if first.get(name) != found.get(name):
                    raise ConfigError(
                        f"column '{name}' is {found.get(name, 'missing')} in {file} and {first.get(name, 'missing')} "
                        f"in {self.files[0]}; make the files alike, or read them one by one."
                    )

    def facts(self) -> list[dict[str, object]]:
        """What they are now: sizes and checksums."""
        return facts_of(self.files)


def facts_of(files: Sequence[str]) -> list[dict[str, object]]:
    """Sizes and checksums of files."""
    return [asdict(_fact(file)) for file in files]


def find_inputs(url: str, kind: str | None = None) -> Inputs:
    """The files of a path, a folder, a pattern or a URL.

    >>> find_inputs("nowhere/*.parquet")
    Traceback (most recent call last):
    shoal.errors.ConfigError: nothing is at nowhere/*.parquet; look at the address.
    """
    files = sorted(_remote(url) if "://" in url else _local(url))
    if not files:
        raise ConfigError(f"nothing is at {hide(url)}; look at the address.")
    kinds = {kind or kind_of_file(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(
            f"{hide(url)} has files of several kinds ({', '.join(sorted(kinds))}); read each by itself."
        )
    return Inputs(url, kinds.pop(), tuple(files))


def kind_of_file(file: str) -> str:
    """By its name: "parquet", "csv" or "json".

    >>> kind_of_file("events.csv.gz")
    'csv'
    """
    for ending in sorted(KINDS, key=len, reverse=True):
        if file.endswith(ending):
            return KINDS[ending]
    raise ConfigError(
        f"{hide(file)} says nothing of its kind; there are {', '.join(sorted(KINDS))}, or give kind='parquet'."
    )


def _local(url: str) -> Iterator[str]:
    if os.path.isdir(url):
        yield from (
            str(path)
            for path in Path(url).rglob("*")
            if path.is_file() and not path.name.startswith((".", "_"))
        )
    elif any(sign in url for sign in "*?["):
        yield from (path for path in glob.glob(url, recursive=True) if os.path.isfile(path))
    elif os.path.exists(url):
        yield url


def _remote(url: str) -> Iterator[str]:
    title = title_of(url)
    files, path = open_url(url, title)
    scheme = url.partition("://")[0]
    try:
        found = _list(files, path)
    except FileNotFoundError:
        return
    except Exception as error:
        raise ConfigError(
            f"{title} cannot be listed ({reason(error)}); check the address, the credentials and the network."
        ) from error
    for name in found:
        yield name if scheme == "file" or "://" in name else f"{scheme}://{name.lstrip('/')}"


def _list(files: FileSystem, path: str) -> list[str]:
    if any(sign in path for sign in "*?["):
        return [str(name) for name in files.glob(path)]
    listed = files.find(path)
    return [str(name) for name in listed if not str(name).rpartition("/")[2].startswith((".", "_"))]


def _fact(file: str) -> InputFile:
    if "://" not in file:
        whole = xxhash.xxh3_64()
        size = 0
        with open(file, "rb") as found:
            while block := found.read(_HASHED):
                whole.update(block)
                size += len(block)
        return InputFile(os.path.abspath(file), size, whole.hexdigest())
    files, path = open_url(file, title_of(file))
    info = files.info(path)
    mark = next((str(info[key]) for key in ("ETag", "etag", "mtime", "LastModified") if key in info), "")
    return InputFile(hide(file), int(info.get("size") or 0), mark or f"read {time.time_ns()}")
