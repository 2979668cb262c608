"""Rows by key, not by number: a hash index over a column of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from shoal.data.batch import Batch
from shoal.data.store.columns import Numbers
from shoal.data.store.places.place import LocalPlace, Place
from shoal.data.store.store import Store
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids
from shoal.partition.hashes import hash_keys

_AT_ONCE = 1_000_000
"""Rows whose keys are in memory together while an index is made."""
_PIECE = 65536


class KeyIndex:
    """Which row has a key. Of several rows with one key the last counts: rows that were appended replace older ones.

    The index is 16 bytes a row. Of a store in a folder it is made once, kept beside the manifest, and mapped.
    Its answers are compared with the store's own keys, so a damaged index never gives another key's row.

    >>> import tempfile, pyarrow as pa
    >>> store = Store.write(tempfile.mkdtemp(), pa.table({"name": ["ann", "bob", "ann"], "age": [1, 2, 3]}))
    >>> index = KeyIndex(store, "name")
    >>> index.rows(["bob", "eve", "ann"]).tolist(), index.batch(["ann"])["age"].tolist()
    ([1, -1, 2], [3])
    """

    def __init__(self, store: Store, column: str) -> None:
        self._store = store
        self._column = column
        self._keys = store.keys(column)
        if self._keys.dtype.kind not in "biuO":
            raise ConfigError(
                f"column '{column}' holds {self._keys.dtype} numbers; a key is a whole number or text."
            )
        self._hashes, self._rows = self._open(store.place)

    def rows(self, keys: Sequence[object]) -> Ids:
        """The row of each key; -1 where there is none.

        What a hash finds is compared with the key itself, and the next older row is looked at where they differ.
        """
        wanted = self._as_array(keys)
        hashes = hash_keys(wanted)
        places = np.searchsorted(self._hashes, hashes, side="right") - 1
        found = np.full(len(wanted), -1, dtype=np.int64)
        open_ones = np.arange(len(wanted))
        while len(open_ones):
            at = places[open_ones]
            same = (at >= 0) & (self._hashes[np.maximum(at, 0)] == hashes[open_ones])
            open_ones = open_ones[same]
            rows = self._rows[places[open_ones]].astype(np.int64)
            rows = np.where((rows >= 0) & (rows < len(self._store)), rows, 0)
            right = np.asarray(self._keys[rows] == wanted[open_ones], dtype=bool)
            found[open_ones[right]] = rows[right]
            open_ones = open_ones[~right]
            places[open_ones] -= 1
        return found

    def batch(self, keys: Sequence[object]) -> Batch:
        """The batch of the rows of these keys, or a refusal that names the first key without one."""
        rows = self.rows(keys)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            raise ConfigError(
                f"{len(missing)} of {len(keys)} keys are not in column '{self._column}', such as "
                f"{keys[int(missing[0])]!r}; ask rows() which there are."
            )
        return self._store.batch(rows)

    def first_rows(self, column: str) -> FirstRows:
        """For `SparseEmbedding(…, initial=)`: keys are its ids, and a column of lists of one length has the values."""
        kind = self._store.column(column)
        if self._keys.dtype.kind not in "iu" or not isinstance(kind, Numbers):
            raise ConfigError(
                f"first rows need whole numbers as keys and lists of one length as values; '{self._column}' is "
                f"{self._keys.dtype}, and '{column}' is {self._store.manifest.columns[column]}."
            )
        return FirstRows(self, kind)

    def _as_array(self, keys: Sequence[Any]) -> Any:
        if self._keys.dtype.kind != "O":
            return np.asarray(keys).astype(self._keys.dtype)
        array = np.empty(len(keys), dtype=object)
        array[:] = list(keys)
        return array

    def _open(self, place: Place) -> tuple[Any, Any]:
        if not isinstance(place, LocalPlace) or self._store.starts_late:
            return self._make()
        path = (
            place.folder
            / f"index-{self._store.version:05}-{xxhash.xxh3_64_hexdigest(self._column.encode())}.npy"
        )
        try:
            table = np.load(path, mmap_mode="r", allow_pickle=False)
            if table.shape == (2, len(self._store)) and table.dtype == np.uint64:
                return table[0], table[1]
        except (OSError, ValueError, EOFError):  # not made yet, or cut short
            pass
        hashes, rows = self._make()
        _save(path, np.stack([hashes, rows]))
        return hashes, rows

    def _make(self) -> tuple[Any, Any]:
        count = len(self._store)
        starts = range(0, count, _AT_ONCE)
        parts = [hash_keys(self._keys[np.arange(a, min(a + _AT_ONCE, count))]) for a in starts]
        hashes = np.concatenate(parts)
        rows = np.argsort(hashes, kind="stable").astype(np.uint64)
        return hashes[rows], rows


@dataclass(frozen=True)
class FirstRows:
    """The keys of an index and a column, piece by piece, each key once."""

    index: KeyIndex
    values: Numbers

    def __call__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and values."""
        index, count = self.index, len(self.index._store)
        for start in range(0, count, _PIECE):
            numbers = np.arange(start, min(start + _PIECE, count))
            keys = index._keys[numbers]
            last = index.rows(keys.tolist()) == numbers  # of several rows with one key the last counts
            found = self.values.gather(index._store.locate(numbers[last]))
            yield torch.from_numpy(keys[last].astype(np.int64)), found.view(len(found), -1)


def _save(path: Path, table: Any) -> None:
    """Whole or not at all; where nothing can be written, the next one makes it again."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "wb") as out:
            np.save(out, table, allow_pickle=False)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
