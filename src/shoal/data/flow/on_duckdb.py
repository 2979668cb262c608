"""DuckDB: in this process, on as many cores as there are; spills to the disk beyond its memory limit.

When to use: always, until the data no longer fit on one machine's disk or take too long on its cores.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from shoal.data.flow.engine import DataType, Engine, Table, Value, need_ibis, to_parquet
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.urls import open_url, title_of

_BATCH = 65536
"""Rows that come from DuckDB at once."""


class DuckDB(Engine):
    """One process with a memory limit."""

    name: ClassVar[str] = "duckdb"
    keeps_order: ClassVar[bool] = True

    def __init__(
        self, memory: str | None = None, threads: int | None = None, spill: str | None = None
    ) -> None:
        self._spill = Path(tempfile.mkdtemp(prefix="shoal-flow-", dir=spill))
        settings: dict[str, object] = {"temp_directory": str(self._spill / "duckdb")}
        if memory is not None:
            settings["memory_limit"] = memory
        if threads is not None:
            settings["threads"] = threads
        self._ibis = need_ibis()
        self._connection = self._ibis.duckdb.connect(**settings)
        self._raw = self._connection.con
        self._schemes: set[str] = set()
        self._made = 0

    def version(self) -> str:
        """Its name and version, for the lineage."""
        return f"duckdb {self._connection.version.removeprefix('v')}"

    def read(self, files: list[str], kind: str, name: str) -> Table:
        """A table of files: "parquet", "csv" or "json". `name`: of the view."""
        if "://" in files[0]:
            return self._read_remote(files, kind, name)
        reader = {"parquet": self._connection.read_parquet, "csv": self._connection.read_csv}.get(
            kind, self._connection.read_json
        )
        return reader(files, table_name=name)

    def hive(self, name: str) -> Table:
        """A table of the engine's own catalogue."""
        return self._connection.table(name)

    def arrow(self, table: object, name: str) -> Table:
        """A table of an Arrow table. `name`: of the view."""
        self._raw.register(name, table)
        return self._connection.table(name)

    def sql(self, text: str) -> Table:
        """A query over views."""
        return self._connection.sql(text)

    def function(
        self, call: Callable[..., object], name: str, takes: list[DataType], gives: DataType
    ) -> Value:
        """A Python function of one row's values, as a function of columns."""
        pa = arrow()
        made = gives.to_pyarrow()

        def over_columns(*columns: Any) -> Any:
            return pa.array([call(*row) for row in zip(*(c.to_pylist() for c in columns), strict=True)], made)

        over_columns.__name__ = name  # in the SQL, and so in the lineage
        return self._ibis.udf.scalar.pyarrow(over_columns, name=name, signature=(tuple(takes), gives))

    def map_batches(
        self, table: Table, change: Callable[[RecordBatch], RecordBatch], schema: Schema
    ) -> Table:
        """What a Python function makes of each record batch, now: through a file, so that memory stays bounded."""
        self._made += 1
        path = self._spill / f"mapped-{self._made}.parquet"
        to_parquet((change(batch) for batch in self.batches(table, 0)), schema, path)
        return self._connection.read_parquet(str(path), table_name=f"mapped_{self._made}")

    def stream(self, batches: Iterator[RecordBatch], schema: Schema, name: str) -> Table:
        """A table of rows that come in batches, by way of a file, so that memory stays bounded."""
        path = self._spill / f"{name}.parquet"
        to_parquet(batches, schema, path)
        return self._connection.read_parquet(str(path), table_name=name)

    def batches(self, table: Table, first: int) -> Iterator[RecordBatch]:
        """The rows of a table from a number on."""
        rest = table.limit(None, offset=first) if first else table
        yield from self._connection.to_pyarrow_batches(rest, chunk_size=_BATCH)

    def progress(self) -> float:
        """How much of the present query is done, from 0 to 1; 0 if that is not known."""
        return max(float(self._raw.query_progress()), 0.0) / 100

    def close(self) -> None:
        """End it, and remove what it has left on the disk."""
        self._connection.disconnect()
        shutil.rmtree(self._spill, ignore_errors=True)

    def _read_remote(self, files: list[str], kind: str, name: str) -> Table:
        """A view of files that DuckDB reads through fsspec: its own way there is an extension from the internet."""
        self._register(files[0])
        listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        reader = {"parquet": "read_parquet", "csv": "read_csv_auto", "json": "read_json_auto"}[kind]
        self._raw.execute(f'create view "{name}" as select * from {reader}([{listed}])')
        return self._connection.table(name)

    def _register(self, file: str) -> None:
        """Let DuckDB read a kind of URL through fsspec."""
        scheme = file.partition("://")[0]
        if "://" in file and scheme not in self._schemes:
            files, _ = open_url(file, title_of(file))
            self._raw.register_filesystem(files)
            self._schemes.add(scheme)
