"""Spark: on the cores of this machine, or on a cluster.

When to use: the data do not fit on one machine's disk, they lie in Hive tables, or there is a cluster anyway. On one
machine DuckDB is several times faster.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from shoal.data.flow.engine import DataType, Engine, Table, Value, local_threads, need_ibis, to_parquet
from shoal.data.store.arrow import RecordBatch, Schema, arrow
from shoal.errors import ConfigError
from shoal.urls import FileSystem, last_name, open_url, title_of

_READABLE = ("file", "hdfs", "viewfs")
"""What Spark reads itself; other URLs are fetched first."""


class Spark(Engine):
    """A Spark session."""

    name: ClassVar[str] = "spark"
    keeps_order: ClassVar[bool] = False

    def __init__(
        self, master: str, memory: str | None = None, spill: str | None = None, hive: str | None = None
    ) -> None:
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise ConfigError(
                f"engine='{master}' needs PySpark, which is not here ({error}); run pip install 'shoal[spark]'."
            ) from error
        self._ibis = need_ibis()
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-flow-", dir=spill))
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else its workers take the system's python3
        warnings.filterwarnings("ignore", message="PySpark does not yet", category=FutureWarning)
        given = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
            "spark.local.dir": str(self._folder / "local"),
            "spark.sql.execution.arrow.pyspark.enabled": "true",
            **({"spark.driver.memory": memory.replace("GB", "g").replace("MB", "m")} if memory else {}),
        }
        address = local_threads(master)
        if not address.startswith(
            "local["
        ):  # a cluster has to reach the driver, as its administrator has set it up
            given = {
                key: value for key, value in given.items() if "spark.driver." not in key or "memory" in key
            }
        builder = SparkSession.builder.master(address).appName("shoal flow")
        for key, value in given.items():
            builder = builder.config(key, value)
        for key, value in _hive(hive).items() if hive else ():
            builder = builder.config(key, value).enableHiveSupport()
        try:
            self._session = builder.getOrCreate()
        except Exception as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(
                f"Spark cannot start ({str(error).strip().splitlines()[0][:200]}); it needs Java 17 or newer, and at "
                f"{master} a running master."
            ) from error
        self._session.sparkContext.setLogLevel("OFF")  # what fails is said in one sentence, by us
        self._connection = self._ibis.pyspark.connect(self._session)
        self._made = 0

    def version(self) -> str:
        """Its name and version, for the lineage."""
        return f"spark {self._session.version}"

    def read(self, files: list[str], kind: str, name: str) -> Table:
        """A table of files: "parquet", "csv" or "json". `name`: of the view."""
        here = [self._near(file, number, name) for number, file in enumerate(files)]
        reader = self._session.read
        if kind == "csv":
            frame = reader.option("header", "true").option("inferSchema", "true").csv(here)
        else:
            frame = reader.parquet(*here) if kind == "parquet" else reader.json(here)
        return self._view(frame, name)

    def hive(self, name: str) -> Table:
        """A table of the engine's own catalogue."""
        return self._view(self._session.table(name), name.replace(".", "_"))

    def arrow(self, table: object, name: str) -> Table:
        """A table of an Arrow table. `name`: of the view."""
        from pyarrow import parquet

        path = self._folder / f"{name}.parquet"
        parquet.write_table(table, path)
        return self._view(self._session.read.parquet(str(path)), name)

    def stream(self, batches: Iterator[RecordBatch], schema: Schema, name: str) -> Table:
        """A table of rows that come in batches, by way of a file, so that memory stays bounded."""
        path = self._folder / f"{name}.parquet"
        to_parquet(batches, schema, path)
        return self._view(self._session.read.parquet(str(path)), name)

    def sql(self, text: str) -> Table:
        """A query over views."""
        return self._view(self._session.sql(text), self._name("query"))

    def function(
        self, call: Callable[..., object], name: str, takes: list[DataType], gives: DataType
    ) -> Value:
        """A Python function of one row's values, as a function of columns."""
        call.__name__ = name  # in the SQL, and so in the lineage
        return self._ibis.udf.scalar.python(call, name=name, signature=(tuple(takes), gives))

    def map_batches(
        self, table: Table, change: Callable[[RecordBatch], RecordBatch], schema: Schema
    ) -> Table:
        """What a Python function makes of each record batch, where the batch is."""
        from pyspark.sql.pandas.types import from_arrow_schema

        def over(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
            for batch in batches:
                yield change(batch)

        given = str(self._folder / self._name("given"))
        self._connection.to_parquet_dir(
            table, given
        )  # ibis registers functions of the flow only where it executes
        frame = self._session.read.parquet(given).mapInArrow(over, from_arrow_schema(schema))
        return self._view(frame, self._name("mapped"))

    def batches(self, table: Table, first: int) -> Iterator[RecordBatch]:
        """The rows of a table from a number on. Spark writes files in parallel, which are then read in order."""
        pa = arrow()
        from pyarrow import parquet

        folder = self._folder / self._name("result")
        self._write(table, str(folder))
        skip = first
        for path in sorted(folder.glob("part-*.parquet")):
            for batch in parquet.ParquetFile(path).iter_batches():
                if skip < batch.num_rows:
                    yield pa.record_batch(batch.slice(skip))
                skip = max(skip - batch.num_rows, 0)
        shutil.rmtree(folder, ignore_errors=True)

    def progress(self) -> float:
        """0: Spark tells only in its own page."""
        return 0.0

    def close(self) -> None:
        """End it, and remove what it has left on the disk."""
        self._session.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, table: Table, folder: str) -> None:
        """A table as Parquet files, by all workers."""
        self._connection.to_parquet_dir(table, folder)

    def _view(self, frame: Any, name: str) -> Table:
        frame.createOrReplaceTempView(name)
        return self._connection.table(name)

    def _name(self, kind: str) -> str:
        self._made += 1
        return f"{kind}_{self._made}"

    def _near(self, file: str, number: int, name: str) -> str:
        """A file where Spark can read it."""
        if "://" not in file or file.partition("://")[0] in _READABLE:
            return file
        files: FileSystem
        files, path = open_url(file, title_of(file))
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        here = folder / f"{number:05}-{last_name(path)}"
        files.get_file(path, str(here))
        return str(here)


def _hive(catalogue: str) -> dict[str, str]:
    """Where Hive keeps its tables: a metastore's address, or a folder with one of our own."""
    if "://" in catalogue:
        return {"spark.hadoop.hive.metastore.uris": catalogue}
    folder = Path(catalogue).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    database = f"jdbc:derby:;databaseName={folder / 'metastore'};create=true"
    return {
        "spark.sql.warehouse.dir": str(folder / "tables"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": database,
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder}",
    }
