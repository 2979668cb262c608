"""WebDataset: tar files in which members of one sample share the name before the first dot."""

from __future__ import annotations

import glob
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shoal.data.readers.base import ROWS, Reader
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.errors import ConfigError

KEY = "key"
_TEXT = ("txt", "text", "json", "transcript")
_NUMBER = ("cls", "cls2", "index", "count")


class WebDataset(Reader):
    """A column for each ending: text, whole numbers (cls), and bytes for all else."""

    summary: ClassVar[str] = "WebDataset: tar files, a column for each ending of their members"

    @staticmethod
    def knows(url: str) -> bool:
        return url.endswith(".tar")

    def schema(self) -> Schema:
        pa = arrow()
        first = next(self._samples(), None)
        if first is None:
            raise ConfigError(f"{self.path} has no samples: no files whose names have an ending.")
        kinds = {
            name: pa.string() if name in _TEXT else pa.int64() if name in _NUMBER else pa.binary()
            for name in first
        }
        kinds[KEY] = pa.string()
        return pa.schema([pa.field(name, kind) for name, kind in kinds.items()])

    def batches(self) -> Iterator[RecordBatch]:
        pa = arrow()
        schema = self.schema()
        held: list[dict[str, object]] = []
        for sample in self._samples():
            if set(sample) != set(schema.names):
                raise ConfigError(
                    f"sample '{sample[KEY]}' in {self.path} has {', '.join(sorted(sample))}, and the first one "
                    f"{', '.join(sorted(schema.names))}; every sample needs the same endings."
                )
            held.append({name: _value(name, value) for name, value in sample.items()})
            if len(held) == ROWS:
                yield pa.RecordBatch.from_pylist(held, schema=schema)
                held = []
        if held:
            yield pa.RecordBatch.from_pylist(held, schema=schema)

    def files(self) -> list[Path]:
        return [Path(name) for name in sorted(glob.glob(str(self.path)))]

    def _samples(self) -> Iterator[dict[str, object]]:
        if not self.files():
            raise ConfigError(f"nothing is at {self.path}; look at the address.")
        for file in self.files():
            sample: dict[str, object] = {}
            try:
                with tarfile.open(file) as archive:
                    for member in archive:
                        key, _, ending = member.name.rpartition("/")[2].partition(".")
                        if not member.isfile() or not key or not ending:
                            continue
                        content = archive.extractfile(member)
                        assert content is not None
                        if sample and sample[KEY] != key:
                            yield sample
                            sample = {}
                        sample |= {KEY: key, ending: content.read()}
            except tarfile.TarError as error:
                raise ConfigError(f"{file} is no whole tar file ({error}); fetch it again.") from error
            if sample:
                yield sample


def _value(name: str, value: Any) -> Any:
    if name in _NUMBER:
        return int(value)
    return value.decode() if name in _TEXT else value
