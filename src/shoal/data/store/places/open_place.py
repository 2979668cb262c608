"""From a URL to the place that it names."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.data.store.places.place import LocalPlace, Place
from shoal.data.store.places.remote_place import RemotePlace

CACHE_LIMIT = 50 * 10**9
"""Bytes of stores at URLs that are kept on this host."""


def cache_folder(given: str | Path | None = None) -> Path:
    """Where blocks of stores at URLs are kept on this host.

    >>> cache_folder("/mnt/fast")
    PosixPath('/mnt/fast')
    """
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def open_place(url: str | Path, cache: Path | None = None) -> Place:
    """The place that a URL or a path names.

    >>> open_place("data/texts").title
    'data/texts'
    """
    text = str(url)
    if "://" not in text:
        return LocalPlace(Path(text))
    if text.startswith("file://"):
        return LocalPlace(Path(text.removeprefix("file://")))
    return RemotePlace(text, cache or cache_folder())
