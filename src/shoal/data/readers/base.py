"""The contract of a reader: a data set of another format as Arrow record batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from shoal.data.store.arrow import RecordBatch, Schema

ROWS = 1024
"""In a batch, of formats that come row by row."""


class Reader(ABC):
    """A data set on a disk of this host."""

    summary: ClassVar[str]

    def __init__(self, url: str) -> None:
        self.path = Path(url)

    @staticmethod
    @abstractmethod
    def knows(url: str) -> bool:
        """Whether what lies there is of this format."""

    @abstractmethod
    def schema(self) -> Schema:
        """Its columns."""

    @abstractmethod
    def batches(self) -> Iterator[RecordBatch]:
        """Its rows, in order."""

    @abstractmethod
    def files(self) -> list[Path]:
        """What it consists of, for the lineage."""
