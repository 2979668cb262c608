"""Data: sources, the one global order of samples, how workers are fed, stores, and flows that build them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.prepared.prepared_store import PreparedStore as PreparedStore
    from shoal.data.store.keys import KeyIndex as KeyIndex
    from shoal.data.store.packed import PackedTokens as PackedTokens
    from shoal.data.store.store import Store as Store

# Loaded on first use: most programs bring data of their own, and need no pyarrow.
_HOME = {
    "KeyIndex": "shoal.data.store.keys",
    "PackedTokens": "shoal.data.store.packed",
    "PreparedStore": "shoal.data.prepared.prepared_store",
    "Store": "shoal.data.store.store",
}
__all__ = ["KeyIndex", "PackedTokens", "PreparedStore", "Store"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
