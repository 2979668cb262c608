"""Slot: how a model's layers are divided over ranks. One file a schedule; this table is the list of them."""

from __future__ import annotations

from shoal.pipeline.base import Schedule
from shoal.pipeline.gpipe import GPipe
from shoal.pipeline.interleaved import Interleaved
from shoal.pipeline.one_f_one_b import OneFOneB
from shoal.pipeline.zero_bubble import ZeroBubble
from shoal.table import Table

TABLE: Table[type[Schedule]] = Table(
    "pipeline schedule",
    {"gpipe": GPipe, "1f1b": OneFOneB, "interleaved": Interleaved, "zerobubble": ZeroBubble},
)
