"""What a version of a store consists of: columns, files with their checksums, and where they came from.

    store/v00001.json, v00002.json      a version each; the highest is the present one
    store/data/<xxh3 of all bytes>.arrow    files, each of one record batch; versions share them

Files are named by what is in them and never change. A version exists once its manifest does, and that is the last to be
written: so a build that is cut short leaves files that nothing names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.errors import ConfigError
from shoal.sealed import seal, unseal

FORMAT = 1
BLOCK = 4 * 2**20
"""Bytes that have a checksum of their own."""
_DATA_NAME = re.compile(r"[0-9a-f]{32}\.arrow")
_VERSION_NAME = re.compile(r"v([0-9]{5,9})\.json")


def version_name(version: int) -> str:
    """The name of a version's manifest.

    >>> version_name(2), version_of("v00002.json"), version_of("notes.json")
    ('v00002.json', 2, None)
    """
    return f"v{version:05}.json"


def version_of(name: str) -> int | None:
    """The version whose manifest has this name."""
    match = _VERSION_NAME.fullmatch(name)
    return int(match[1]) if match is not None else None


def is_data_name(name: str) -> bool:
    """Whether a store could have given a file this name."""
    return _DATA_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class StoreFile:
    """One file of a store."""

    name: str
    rows: int
    bytes: int
    digest: str
    """xxh3_128 of all of it."""
    blocks: str
    """xxh3_64 of each block, as hexadecimal digits one after the other."""
    nulls: Mapping[str, int] = field(default_factory=dict)
    """How many, of columns that have some."""
    lengths: Mapping[str, list[int]] = field(default_factory=dict)
    """The shortest and the longest list of each column of lists."""


@dataclass(frozen=True)
class StoreManifest:
    """One version of a store."""

    version: int
    columns: Mapping[str, str]
    """The type of each column, in order."""
    files: tuple[StoreFile, ...]
    lineage: tuple[Mapping[str, Any], ...] = ()
    """Of each version: its rows, and which flow, inputs and engine they came from."""
    features: Mapping[str, object] = field(default_factory=dict)
    """Fitted features, by name."""

    @property
    def rows(self) -> int:
        """Of all files."""
        return sum(file.rows for file in self.files)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    def rows_of(self, version: int) -> int:
        """How many rows an earlier version of this store had, or a refusal."""
        for entry in self.lineage:
            if entry.get("version") == version:
                return int(entry["rows"])
        raise ConfigError(f"version {self.version} did not grow from version {version}.")

    def dumps(self) -> bytes:
        """As sealed JSON."""
        return seal({"format": FORMAT, **asdict(self)})

    @staticmethod
    def loads(text: bytes) -> StoreManifest:
        """What `dumps` wrote; ValueError, with a reason, for anything else.

        >>> made = StoreManifest(1, {"x": "int64"}, (StoreFile("0" * 32 + ".arrow", 3, 10, "0" * 32, "1" * 16),))
        >>> StoreManifest.loads(made.dumps()) == made
        True
        """
        body = unseal(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise ValueError(f"it has format {found}, and this version of shoal reads {FORMAT}")
        try:
            files = tuple(_file(StoreFile(**facts)) for facts in body["files"])
            columns = {str(name): str(kind) for name, kind in body["columns"].items()}
            version, lineage = body["version"], tuple(body["lineage"])
            made = StoreManifest(version, columns, files, lineage, dict(body["features"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an entry is missing or of the wrong kind ({error})") from error
        if type(version) is not int or version < 1 or not columns:
            raise ValueError(f"its version is {version!r}, and it has {len(columns)} columns")
        return made


def _file(file: StoreFile) -> StoreFile:
    """What comes from a disk may name anything."""
    numbers = (file.rows, file.bytes)
    if not is_data_name(str(file.name)) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise ValueError(
            f"a file is called {str(file.name)[:80]!r}, with {file.rows} rows and {file.bytes} bytes"
        )
    if not isinstance(file.blocks, str) or len(file.blocks) != 16 * -(-file.bytes // BLOCK):
        raise ValueError(f"{file.name} has {file.bytes} bytes and not as many checksums")
    return file
