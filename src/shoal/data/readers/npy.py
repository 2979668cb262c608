"""numpy arrays: a .npy file is a column, a folder of them a table. They are mapped and not read."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.data.readers.base import Reader
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.errors import ConfigError


class Npy(Reader):
    """Arrays by the names of their files; the first dimension counts rows."""

    summary: ClassVar[str] = "numpy arrays: .npy files of one length, a column each"

    @staticmethod
    def knows(url: str) -> bool:
        path = Path(url)
        return url.endswith(".npy") or (path.is_dir() and any(path.glob("*.npy")))

    def schema(self) -> Schema:
        pa = arrow()
        return pa.schema([pa.field(name, _type(array)) for name, array in self._arrays().items()])

    def batches(self) -> Iterator[RecordBatch]:
        pa = arrow()
        arrays = self._arrays()
        schema = self.schema()
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1:
            raise ConfigError(
                f"the arrays in {self.path} have unequal lengths ({rows}); each row needs one of each."
            )
        for start in range(0, next(iter(rows.values())), 65536):
            columns = [_column(array[start : start + 65536]) for array in arrays.values()]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.npy")) if self.path.is_dir() else [self.path]

    def _arrays(self) -> dict[str, Any]:
        try:
            found = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in self.files()}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} cannot be read as numpy arrays ({error}).") from error
        for name, array in found.items():
            if array.ndim == 0 or array.dtype.kind not in "biuf":
                raise ConfigError(
                    f"array '{name}' in {self.path} is {array.dtype} of {array.ndim} dimensions; give numbers."
                )
        return found


def _type(array: Any) -> Any:
    pa = arrow()
    made = pa.from_numpy_dtype(array.dtype)
    for size in reversed(array.shape[1:]):
        made = pa.list_(made, size)
    return made


def _column(part: Any) -> Any:
    pa = arrow()
    made = pa.array(np.ascontiguousarray(part).reshape(-1))
    for place in range(part.ndim - 1, 0, -1):
        made = pa.FixedSizeListArray.from_arrays(made, part.shape[place])
    assert len(made) == len(part) or not prod(part.shape)
    return made
