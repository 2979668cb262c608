"""Flows: tables read, filtered, joined, grouped and written to stores, on DuckDB or on Spark."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.flow.features import Fitted as Fitted
    from shoal.data.flow.features import bucketise as bucketise
    from shoal.data.flow.features import fit as fit
    from shoal.data.flow.features import hashed as hashed
    from shoal.data.flow.features import standardise as standardise
    from shoal.data.flow.features import vocabulary as vocabulary
    from shoal.data.flow.flow import Flow as Flow
    from shoal.data.flow.mapreduce import map_reduce as map_reduce
    from shoal.data.flow.sessions import Session as Session
    from shoal.data.flow.sessions import read as read
    from shoal.data.flow.sessions import session as session

    _: Any

# Loaded on first use: ibis takes a second.
_HOME = {
    "Fitted": "shoal.data.flow.features",
    "Flow": "shoal.data.flow.flow",
    "Session": "shoal.data.flow.sessions",
    "_": "ibis",
    "bucketise": "shoal.data.flow.features",
    "fit": "shoal.data.flow.features",
    "hashed": "shoal.data.flow.features",
    "map_reduce": "shoal.data.flow.mapreduce",
    "read": "shoal.data.flow.sessions",
    "session": "shoal.data.flow.sessions",
    "standardise": "shoal.data.flow.features",
    "vocabulary": "shoal.data.flow.features",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.data.flow' has no attribute {name!r}")
    if name == "_":
        from shoal.data.flow.engine import need_ibis

        return need_ibis()._
    return getattr(import_module(_HOME[name]), name)
