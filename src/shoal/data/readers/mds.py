"""MosaicML's MDS: a folder with index.json and shards of samples behind a table of offsets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.data.readers.base import ROWS, Reader
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.errors import ConfigError
from shoal.sealed import read_file

_NUMBERS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
_TEXT = ("str", "json", "str_int", "str_float", "str_decimal")
_BYTES = ("bytes", "jpeg", "png")


class Mds(Reader):
    """Shards that are not compressed; numbers, text, bytes and images, which stay as they are encoded."""

    summary: ClassVar[str] = "MosaicML's MDS: numbers, text, bytes and encoded images"

    @staticmethod
    def knows(url: str) -> bool:
        index = Path(url) / "index.json"
        return index.is_file() and b'"mds"' in read_file(index)

    def schema(self) -> Schema:
        pa = arrow()
        shard = self._shards()[0]
        fields = []
        for name, encoding in zip(shard["column_names"], shard["column_encodings"], strict=True):
            if encoding in _NUMBERS or encoding == "int":
                kind = pa.from_numpy_dtype(np.dtype("int64" if encoding == "int" else encoding))
            elif encoding in (*_TEXT, *_BYTES):
                kind = pa.string() if encoding in _TEXT else pa.binary()
            else:
                raise ConfigError(
                    f"column '{name}' of {self.path} is encoded as {encoding}, which is not read here; there are "
                    f"{', '.join(('int', *_NUMBERS, *_TEXT, *_BYTES))}."
                )
            fields.append(pa.field(name, kind))
        return pa.schema(fields)

    def batches(self) -> Iterator[RecordBatch]:
        pa = arrow()
        schema = self.schema()
        for shard, file in zip(self._shards(), self.files(), strict=True):
            text = read_file(file)
            count = int(np.frombuffer(text, np.uint32, 1)[0])
            offsets = np.frombuffer(text, np.uint32, count + 1, 4).tolist()
            for start in range(0, count, ROWS):
                rows = [
                    _sample(shard, text[offsets[i] : offsets[i + 1]])
                    for i in range(start, min(start + ROWS, count))
                ]
                yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def files(self) -> list[Path]:
        return [self.path / str(shard["raw_data"]["basename"]) for shard in self._shards()]

    def _shards(self) -> list[dict[str, Any]]:
        try:
            shards: list[dict[str, Any]] = json.loads(read_file(self.path / "index.json"))["shards"]
            names = [str(shard["raw_data"]["basename"]) for shard in shards]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path}/index.json cannot be used ({error}).") from error
        if not shards or any("/" in name for name in names):
            raise ConfigError(f"{self.path}/index.json names no shards of its folder.")
        if any(
            shard.get("zip_data") and not (self.path / name).exists()
            for shard, name in zip(shards, names, strict=True)
        ):
            raise ConfigError(f"the shards in {self.path} are compressed; decompress them first.")
        return shards


def _sample(shard: dict[str, Any], data: bytes) -> dict[str, Any]:
    """One sample: the sizes of what varies, then all values."""
    place = 0
    sizes = []
    for size in shard["column_sizes"]:
        if not size:
            size = int(np.frombuffer(data, np.uint32, 1, place)[0])
            place += 4
        sizes.append(size)
    row = {}
    for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
        value = data[place : place + size]
        place += size
        row[name] = _decode(encoding, value)
    return row


def _decode(encoding: str, value: bytes) -> object:
    if encoding in _TEXT:
        return value.decode()
    if encoding in _BYTES:
        return value
    return np.frombuffer(value, "int64" if encoding == "int" else encoding)[0].item()
