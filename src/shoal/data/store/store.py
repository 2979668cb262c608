"""`shoal.data.Store`: a data set on disk that is read at memory speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.source import BatchSource
from shoal.data.store.arrow import RecordBatch, Schema
from shoal.data.store.build import BuildOptions as BuildOptions
from shoal.data.store.build import Rows, build
from shoal.data.store.columns import (
    Column,
    ColumnData,
    Fill,
    Keys,
    Lists,
    Located,
    Numbers,
    make_column,
    row_starts,
)
from shoal.data.store.cut import digest_of
from shoal.data.store.manifest import StoreManifest
from shoal.data.store.mapping import Mapping as MappedFile
from shoal.data.store.places.open_place import CACHE_LIMIT, cache_folder, open_place
from shoal.data.store.places.pages import Cache, Pages
from shoal.data.store.places.place import LocalPlace, Place
from shoal.data.store.places.remote_place import RemotePlace
from shoal.data.store.span import Memory
from shoal.data.store.verify import problems
from shoal.data.store.versions import read_manifest
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.table import did_you_mean
from shoal.world.failure import end_in_one_sentence
from shoal.world.launch import from_environment

Sample = Any
"""A dict by column name; a tuple where `columns=` says which."""
Transform = Callable[[Sample], object]


class Store(BatchSource):
    """A data set in memory-mapped Arrow files: any row, or a whole batch of rows, without reading the rest.

    >>> import tempfile, pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> store = Store.write(folder, pa.table({"x": [0.5, 1.5, 2.5], "name": ["a", "b", "c"]}))
    >>> len(store), store[1], store.batch(np.array([2, 0]))["x"].tolist()
    (3, {'x': tensor(1.5000, dtype=torch.float64), 'name': 'b'}, [2.5, 0.5])
    >>> Store(folder, columns=("x",))[2]
    (tensor(2.5000, dtype=torch.float64),)
    """

    grows = True

    def __init__(
        self,
        url: str | Path,
        *,
        version: int | None = None,
        since: int | None = None,
        columns: Sequence[str] | None = None,
        pad: Mapping[str, float] | None = None,
        fill: Mapping[str, Fill] | None = None,
        transform: Transform | None = None,
        cache: str | Path | None = None,
        cache_limit: int = CACHE_LIMIT,
    ) -> None:
        """`version`: None is the newest. `since`: only rows that came after that version.

        `columns`: samples are tuples of these columns, in this order; by default dicts of all of them. `pad`: fills
        rows of lists up to the longest of their batch. `fill`: what stands for null. `transform`: sample -> sample;
        what it draws from global generators is keyed by sample. `cache`: the folder for blocks of a store at a URL, by
        default ~/.cache/shoal, which holds up to `cache_limit` bytes.
        """
        end_in_one_sentence(from_environment().rank)
        self.url = str(url)
        self._asked = {
            "version": version,
            "since": since,
            "columns": columns,
            "pad": pad,
            "fill": fill,
            "transform": transform,
            "cache": cache,
            "cache_limit": cache_limit,
        }
        self._cache = Cache(cache_folder(cache), cache_limit)
        self._place = open_place(url, self._cache.folder)
        self.manifest = read_manifest(self._place, version)
        self.version = self.manifest.version
        self._first = self.manifest.rows_of(since) if since is not None else 0
        self._rows = self.manifest.rows - self._first
        self._starts = row_starts([file.rows for file in self.manifest.files])
        self._tuple = columns is not None
        self._names = tuple(columns) if columns is not None else tuple(self.manifest.columns)
        self._transform = transform
        self._pad = dict(pad or {})
        self._fill = dict(fill or {})
        for name in (*self._names, *self._pad, *self._fill):
            self._check(name)
        self._columns: dict[str, Column] = {}
        self._batches: list[RecordBatch] = []
        self._pages: Pages | None = None
        self._memory: Memory | None = None

    @staticmethod
    def write(
        url: str | Path,
        rows: Any,
        *,
        options: BuildOptions | None = None,
        lineage: Mapping[str, object] | None = None,
    ) -> Store:
        """A store of an Arrow table, or of record batches; `shoal.data.flow` writes larger ones."""
        batches = rows.to_batches() if hasattr(rows, "to_batches") else list(rows)
        if not batches:
            raise ConfigError(f"there are no rows to write; nothing is written to {url}.")
        given = {"rows_digest": digest_of(batches), **(lineage or {})}
        build(open_place(url), batches[0].schema, _from_row(batches), given, options)
        return Store(url)

    def __len__(self) -> int:
        """How many samples there are."""
        return self._rows

    def __getitem__(self, index: int) -> Sample:
        """One sample; negative numbers count from the end."""
        row = index + self._rows if index < 0 else index
        if not 0 <= row < self._rows:
            raise IndexError(f"sample {index} of {self._rows}")
        return self.__getitems__([row])[0]

    def __getitems__(self, ids: list[int]) -> list[Sample]:
        """Several samples, gathered at once: torch's protocol for data sets that can."""
        where = self.locate(np.asarray(ids, dtype=np.int64))
        columns = [self._rows_of(self.column(name), where) for name in self._names]
        samples: list[Sample] = list(zip(*columns, strict=True))
        if not self._tuple:
            samples = [dict(zip(self._names, sample, strict=True)) for sample in samples]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    @property
    def whole_batches(self) -> bool:
        """Whether `batch` gives what samples one by one would."""
        return self._transform is None

    def batch(self, ids: Ids) -> Batch:
        """The batch of some samples: a dict or a tuple of tensors, and of lists where a column is no numbers."""
        where = self.locate(ids)
        values = [self.column(name).gather(where) for name in self._names]
        return tuple(values) if self._tuple else dict(zip(self._names, values, strict=True))

    def keys(self, name: str) -> Keys:
        """A column to divide samples by, read where it is asked: of lists, their length."""
        return Keys(self.column(name), self.locate, self._rows)

    @property
    def key_names(self) -> tuple[str, ...]:
        """Columns that a partition may ask for."""
        return tuple(self.manifest.columns)

    def tensor(self, name: str) -> torch.Tensor:
        """All rows of a column of numbers, without a copy where they lie in one file.

        What is written to it stays in this process, and changes what it reads from then on.
        """
        column = self.column(name)
        if not isinstance(column, Numbers):
            raise ConfigError(
                f"column '{name}' is {self.manifest.columns[name]}, and a tensor needs numbers."
            )
        whole = column.whole()
        if whole is None:
            return column.gather(self.locate(np.arange(self._rows)))
        whole.of_store = self  # type: ignore[attr-defined]  # the memory lives as long as somebody looks at it
        return whole[self._first :]

    def column(self, name: str) -> Column:
        """A column over all files; mapped when it is first asked for."""
        if name not in self._columns:
            self._check(name)
            self._map()
            files = self.manifest.files
            lengths = {length for file in files for length in file.lengths.get(name, [0, 1])}
            data = ColumnData(
                name,
                [batch.column(name) for batch in self._batches],
                sum(file.nulls.get(name, 0) for file in files),
                self._fill.get(name),
                self._pad.get(name),
                len(lengths) == 1,
                self._memory,
            )
            self._columns[name] = make_column(data.arrays[0].type, data)
        return self._columns[name]

    @property
    def features(self) -> Mapping[str, Any]:
        """Fitted features in it, by name."""
        return self.manifest.features

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self._place

    @property
    def starts_late(self) -> bool:
        """Whether `since` leaves rows out."""
        return self._first > 0

    def record_batches(self, rows: int | None = None) -> list[RecordBatch]:
        """The mapped files as Arrow's record batches, without those rows that `since` leaves out.

        `rows`: no more files than hold so many of the first rows.
        """
        self._map()
        found: list[RecordBatch] = []
        for number, (batch, start) in enumerate(zip(self._batches, self._starts.tolist(), strict=True)):
            if rows is not None and start - self._first >= rows:
                break
            if self._pages is not None:
                self._pages.need_all(number)
            skipped = max(self._first - start, 0)
            if skipped < batch.num_rows:
                found.append(batch.slice(skipped))
        return found

    @property
    def schema(self) -> Schema:
        """The columns and their types, as Arrow names them."""
        self._map()
        return self._batches[0].schema

    def verify(self) -> list[str]:
        """Read every byte; a sentence for each file that is not what it was."""
        return list(problems(self._place, self.manifest))

    def locate(self, ids: Ids) -> Located:
        """The file of each sample, and its row there."""
        rows = ids + self._first if self._first else ids
        if len(self._starts) == 1:
            files = np.zeros(len(rows), dtype=np.int64)
            local = rows
        else:
            files = np.searchsorted(self._starts, rows, side="right") - 1
            local = rows - self._starts[files]
        if len(ids) and (ids.min() < 0 or ids.max() >= self._rows):
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {self._rows}")
        return Located(files, local)

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[object, ...]]:
        # Loader processes map the files themselves; and they open this version, whatever has come since.
        return _reopen, (self.url, {**self._asked, "version": self.version})

    def __repr__(self) -> str:
        return f"Store({self.url!r}, version={self.version}: {self._rows} rows of {', '.join(self._names)})"

    def _rows_of(self, column: Column, where: Located) -> Iterable[object]:
        return column.rows(where) if isinstance(column, Lists) else column.gather(where)

    def _check(self, name: str) -> None:
        if name not in self.manifest.columns:
            raise ConfigError(f"the store has no column '{name}'{did_you_mean(name, self.manifest.columns)}")

    def _map(self) -> None:
        if self._batches:
            return
        files = self.manifest.files
        paths = self._paths()
        mapped = [MappedFile(path, file.bytes) for path, file in zip(paths, files, strict=True)]
        if self._pages is not None:
            self._memory = Memory(self._pages, [one.address for one in mapped])
        batches = []
        for path, file, one in zip(paths, files, mapped, strict=True):
            batch = one.record_batch()
            found = {entry.name: str(entry.type) for entry in batch.schema}
            if batch.num_rows != file.rows or found != dict(self.manifest.columns):
                raise ConfigError(
                    f"{path} has {batch.num_rows} rows of {found}, and its manifest says otherwise; "
                    "it is damaged."
                )
            batches.append(batch)
        self._batches = batches

    def _paths(self) -> list[Path]:
        """Where the files can be mapped."""
        files = self.manifest.files
        if isinstance(self._place, LocalPlace):
            return [self._place.local(file) for file in files]
        assert isinstance(self._place, RemotePlace)
        folder = self._cache.hold(self._place.title, self.manifest.nbytes)
        self._pages = Pages(folder, files, self._place.fetch, self._place.title)
        self._pages.need_ends()
        return self._pages.paths


def _from_row(batches: list[RecordBatch]) -> Rows:
    def rows(first: int) -> Iterable[RecordBatch]:
        left = first
        for batch in batches:
            if left < batch.num_rows:
                yield batch.slice(left)
            left = max(left - batch.num_rows, 0)

    return rows


def _reopen(url: str, asked: dict[str, Any]) -> Store:
    return Store(url, **asked)


def open_manifest(url: str | Path, version: int | None = None) -> StoreManifest:
    """What a store consists of, without a look at its files."""
    return read_manifest(open_place(url), version)
