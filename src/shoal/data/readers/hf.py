"""Hugging Face data sets, as `save_to_disk` writes them: Arrow streams, mapped and not read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shoal.data.readers.base import Reader
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.errors import ConfigError


class HuggingFace(Reader):
    """A folder that `Dataset.save_to_disk` has written."""

    summary: ClassVar[str] = "Hugging Face data sets, as save_to_disk writes them"

    @staticmethod
    def knows(url: str) -> bool:
        return (Path(url) / "state.json").is_file() and (Path(url) / "dataset_info.json").is_file()

    def schema(self) -> Schema:
        return self._open(self.files()[0]).schema.remove_metadata()

    def batches(self) -> Iterator[RecordBatch]:
        schema = self.schema()
        for file in self.files():
            for batch in self._open(file):
                yield arrow().RecordBatch.from_arrays(batch.columns, schema=schema)

    def files(self) -> list[Path]:
        state = json.loads((self.path / "state.json").read_text())
        if state.get("_indices_files"):
            raise ConfigError(
                f"{self.path} holds a selection of rows of its files; call flatten_indices() before "
                "save_to_disk."
            )
        names = [str(entry["filename"]) for entry in state.get("_data_files") or []]
        if not names or any("/" in name or name.startswith(".") for name in names):
            raise ConfigError(
                f"{self.path}/state.json names no files of its folder; write the data set once more."
            )
        return [self.path / name for name in names]

    def _open(self, file: Path) -> Any:
        pa = arrow()
        return pa.ipc.open_stream(pa.memory_map(str(file)))
