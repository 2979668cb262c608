"""Slot: other people's data sets as sources of a flow. One file a format; this table is the list of them."""

from __future__ import annotations

from shoal.data.readers.base import Reader
from shoal.data.readers.hf import HuggingFace
from shoal.data.readers.mds import Mds
from shoal.data.readers.npy import Npy
from shoal.data.readers.webdataset import WebDataset
from shoal.table import Table

TABLE: Table[type[Reader]] = Table(
    "reader", {"hf": HuggingFace, "mds": Mds, "npy": Npy, "webdataset": WebDataset}
)


def reader_for(url: str, kind: str | None) -> Reader | None:
    """The reader of a format that is no plain table of files; None for those that engines read themselves."""
    if kind is not None:
        return TABLE[kind](url) if kind in TABLE else None
    return next((made(url) for made in TABLE.values() if made.knows(url)), None)
