"""The contract of an engine: what a flow needs of DuckDB or Spark beside ibis, which writes their SQL."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from shoal.data.store.arrow import RecordBatch, Schema
from shoal.errors import ConfigError

Table = Any
"""ibis.expr.types.Table"""
Value = Any
"""ibis.expr.types.Value, or a deferred one"""
DataType = Any
"""ibis.expr.datatypes.DataType"""

MARK = "shoal-row: "
"""What is raised in a function of the user's comes back as text of the engine's; this finds it there."""


def need_ibis() -> ModuleType:
    """ibis, or how to get it."""
    try:
        import ibis
    except ImportError as error:
        raise ConfigError(
            f"flows need ibis and DuckDB, which are not here ({error}); run pip install 'shoal[data]'."
        ) from error
    module: ModuleType = ibis
    return module


class Engine(ABC):
    """Where a flow runs."""

    name: ClassVar[str]
    keeps_order: ClassVar[bool]
    """Whether rows come in the order of the files, as long as nothing joins or groups."""

    @abstractmethod
    def version(self) -> str:
        """Its name and version, for the lineage."""

    @abstractmethod
    def read(self, files: list[str], kind: str, name: str) -> Table:
        """A table of files: "parquet", "csv" or "json". `name`: of the view."""

    @abstractmethod
    def hive(self, name: str) -> Table:
        """A table of the engine's own catalogue."""

    @abstractmethod
    def arrow(self, table: object, name: str) -> Table:
        """A table of an Arrow table. `name`: of the view."""

    @abstractmethod
    def stream(self, batches: Iterator[RecordBatch], schema: Schema, name: str) -> Table:
        """A table of rows that come in batches, by way of a file, so that memory stays bounded."""

    @abstractmethod
    def sql(self, text: str) -> Table:
        """A query over views."""

    @abstractmethod
    def function(
        self, call: Callable[..., object], name: str, takes: list[DataType], gives: DataType
    ) -> Value:
        """A Python function of one row's values, as a function of columns."""

    @abstractmethod
    def map_batches(
        self, table: Table, change: Callable[[RecordBatch], RecordBatch], schema: Schema
    ) -> Table:
        """What a Python function makes of each record batch, now."""

    @abstractmethod
    def batches(self, table: Table, first: int) -> Iterator[RecordBatch]:
        """The rows of a table from a number on."""

    @abstractmethod
    def progress(self) -> float:
        """How much of the present query is done, from 0 to 1; 0 if that is not known."""

    @abstractmethod
    def close(self) -> None:
        """End it, and remove what it has left on the disk."""


def to_parquet(batches: Iterator[RecordBatch], schema: Schema, path: Path) -> None:
    """Batches into a file as they come."""
    from pyarrow import Table, parquet

    with parquet.ParquetWriter(path, schema, compression="none") as writer:
        for batch in batches:
            if batch.num_rows:
                writer.write_table(Table.from_batches([batch], schema))


def sentence(error: BaseException) -> str:
    """What an engine raised, as the end of one sentence.

    >>> sentence(ValueError("Invalid Input Error: shoal-row: half(x=1) raised ValueError: odd\\n\\nAt: ..."))
    'half(x=1) raised ValueError: odd'
    """
    text = str(error).strip()
    if MARK in text:
        return text.split(MARK, 1)[1].splitlines()[0].rstrip(".")
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s+", " ", first)[:400].rstrip(". ")


def local_threads(name: str) -> str:
    """The master that a text names: "spark" is every core of this machine.

    >>> local_threads("spark"), local_threads("local[2]"), local_threads("spark://host:7077")
    ('local[*]', 'local[2]', 'spark://host:7077')
    """
    return "local[*]" if name == "spark" else name


def is_spark(name: str) -> bool:
    """Whether a text names Spark."""
    return name == "spark" or name.startswith(("local[", "spark://", "yarn", "k8s://"))
