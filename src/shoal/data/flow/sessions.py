"""A session: an engine, and the tables that are read with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.data.flow.engine import Engine, Table, is_spark
from shoal.data.flow.errors import running
from shoal.data.flow.flow import Flow
from shoal.data.flow.inputs import facts_of, find_inputs
from shoal.data.flow.on_duckdb import DuckDB
from shoal.data.flow.on_spark import Spark
from shoal.data.flow.sql import with_views
from shoal.data.readers import reader_for
from shoal.data.store.arrow import arrow
from shoal.data.store.cut import digest_of
from shoal.data.store.places.open_place import open_place
from shoal.data.store.places.place import LocalPlace
from shoal.data.store.store import Store
from shoal.errors import ConfigError
from shoal.table import did_you_mean
from shoal.urls import hide
from shoal.world.failure import end_in_one_sentence
from shoal.world.launch import from_environment


class Session:
    """An engine, and the tables that are read with it. Close it, or use it in a `with`.

    >>> import pyarrow as pa
    >>> from shoal.data.flow import _
    >>> with session() as data:
    ...     data.rows(pa.table({"x": [1, 2, 3]})).filter(_.x > 1).count()
    2
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._views = 0

    def read(self, url: str | Path, kind: str | None = None, schema: Mapping[str, str] | None = None) -> Flow:
        """A table of files: Parquet, CSV, JSON lines, other formats (shoal.data.readers), a store, `hive://db.table`.

        `kind`: "parquet", "csv" or "json", where names of files do not tell. `schema`: columns and types that there
        have to be.
        """
        text = str(url)
        if text.startswith("hive://"):
            with running(f"reading {text}"):
                table = self.engine.hive(text.removeprefix("hive://"))
            return Flow(
                self.engine, _checked(table, schema, text), (lambda: [{"url": text, "read": time.time_ns()}],)
            )
        if kind is None and _is_store(text):
            return self._read_store(text)
        reader = None if "://" in text else reader_for(text, kind)
        if reader is not None:
            table = self.engine.stream(reader.batches(), reader.schema(), self._view("read"))
            facts = partial(facts_of, [str(file) for file in reader.files()])
            return Flow(self.engine, _checked(table, schema, text), (facts,), self.engine.keeps_order)
        inputs = find_inputs(text, kind)
        inputs.check_alike()
        with running(f"reading {hide(text)}"):
            table = self.engine.read(list(inputs.files), inputs.kind, self._view("read"))

        if (
            inputs.kind == "csv"
            and len(table.columns) == 1
            and any(sign in table.columns[0] for sign in ",;\t|")
        ):
            raise ConfigError(
                f"{hide(text)} begins with {table.columns[0][:60]!r}, and its lines do not all have as many values; "
                "mend the lines that are too short or too long."
            )
        found = _checked(table, schema, text)
        return Flow(self.engine, found, (inputs.facts,), self.engine.keeps_order)

    def rows(self, table: Any) -> Flow:
        """A table of an Arrow table."""
        made = self.engine.arrow(table, self._view("rows"))

        def facts() -> list[dict[str, Any]]:
            return [{"rows": table.num_rows, "digest": digest_of(table.to_batches())}]

        return Flow(self.engine, made, (facts,), self.engine.keeps_order)

    def sql(self, query: str) -> Flow:
        """A query; what it reads stands in quotes: select kind, count(*) from 'events/*.parquet' group by kind."""
        text, flows = with_views(query, self.read)
        with running("the query"):
            table = self.engine.sql(text)
        return Flow(self.engine, table, tuple(fact for flow in flows for fact in flow.inputs))

    def close(self) -> None:
        """End the engine, and remove what it has left on the disk."""
        self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_store(self, url: str) -> Flow:
        store = Store(url)
        made = self.engine.arrow(arrow().Table.from_batches(store.record_batches()), self._view("store"))
        facts = {
            "url": hide(url),
            "version": store.version,
            "files": [file.digest for file in store.manifest.files],
        }
        return Flow(self.engine, made, (lambda: [facts],), self.engine.keeps_order)

    def _view(self, kind: str) -> str:
        self._views += 1
        return f"{kind}_{self._views}"


def session(
    engine: str = "duckdb",
    memory: str | None = None,
    threads: int | None = None,
    spill: str | None = None,
    hive: str | None = None,
) -> Session:
    """A session of an engine: "duckdb", or Spark as "spark", "local[2]" or "spark://host:7077".

    `memory`: a limit of the engine such as "2GB"; beyond it, it spills to `spill`, by default the folder for temporary
    files. Python and the files being written come on top of it: about half a gigabyte.
    `hive`: with Spark, the address of a metastore such as "thrift://host:9083", or a folder with one of its own.
    """
    end_in_one_sentence(from_environment().rank)
    if is_spark(engine):
        return Session(Spark(engine, memory, spill, hive))
    if engine != "duckdb" or hive is not None:
        raise ConfigError(
            f"engine='{engine}'{', hive=' + repr(hive) if hive else ''}; it is duckdb, or spark, local[2] or "
            "spark://host:7077, and Hive tables need Spark."
        )
    return Session(DuckDB(memory, threads, spill))


def read(url: str | Path, kind: str | None = None) -> Flow:
    """A table of files, on a DuckDB of its own."""
    return session().read(url, kind)


def _is_store(url: str) -> bool:
    if any(sign in url for sign in "*?["):
        return False
    if "://" in url and not url.startswith("file://"):
        return url.endswith("/") and bool(open_place(url).versions())
    return bool(LocalPlace(Path(url.removeprefix("file://"))).versions())


def _checked(table: Table, schema: Mapping[str, str] | None, url: str) -> Table:
    """Refuse a table that is not what the flow was written for."""
    for name, kind in (schema or {}).items():
        if name not in table.columns:
            raise ConfigError(f"{hide(url)} lacks column '{name}'{did_you_mean(name, table.columns)}")
        found = str(table.schema()[name])
        if found != kind:
            raise ConfigError(f"column '{name}' of {hide(url)} is {found}, and the flow expects {kind}.")
    return table
