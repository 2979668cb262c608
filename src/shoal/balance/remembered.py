"""Speeds of earlier runs: a small JSON file in the user's cache folder.

What is read is checked before it is believed: a file that is too large, damaged, or of another make counts as empty.
Written by replacing it as a whole, so a reader never sees half of one; of two runs that end at once, one is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FORMAT = 1
LARGEST = 1 << 20
"""Bytes of a file that is read at all."""
ENTRIES = 200
"""The oldest beyond that are forgotten."""


def default_path() -> Path:
    """Where speeds are kept: in XDG_CACHE_HOME, or in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "shoal" / "speeds.json"


def key_of(shapes: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """Names a model on machines, without saying which: its parameters' shapes, and the host of each worker.

    >>> key_of({"weight": (3, 4)}, ["a", "b"]) == key_of({"weight": (3, 4)}, ["b", "a"])
    False
    """
    facts = [[[name, list(shape)] for name, shape in shapes.items()], list(hosts)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def stored_speeds(path: Path, key: str, workers: int) -> tuple[float, ...]:
    """The speeds of so many workers that are kept under a key; empty if there are none to be believed."""
    entry = _read(path).get(key)
    return check_speeds(entry.get("speeds") if isinstance(entry, dict) else None, workers)


def check_speeds(found: object, workers: int) -> tuple[float, ...]:
    """Speeds from a file, if they are: one for each worker, above 0 and finite, and none a million times another.

    >>> check_speeds([2, 1.5], 2), check_speeds([2, "x"], 2), check_speeds([0, 1], 2), check_speeds(None, 2)
    ((2.0, 1.5), (), (), ())
    """
    if not isinstance(found, list) or len(found) != workers:
        return ()
    if not all(type(speed) in (int, float) and math.isfinite(speed) and speed > 0 for speed in found):
        return ()
    return tuple(float(speed) for speed in found) if max(found) <= 1e6 * min(found) else ()


def keep(path: Path, key: str, speeds: Sequence[float], now: float) -> None:
    """Keep speeds under a key. OSError where that cannot be."""
    entries = {**_read(path), key: {"speeds": list(speeds), "time": now}}
    newest = sorted(entries, key=lambda name: _time_of(entries[name]))[-ENTRIES:]
    text = json.dumps({"format": FORMAT, "entries": {name: entries[name] for name in newest}}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".speeds-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        body = json.loads(text) if len(text) <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return {}
    entries = body.get("entries") if isinstance(body, dict) and body.get("format") == FORMAT else None
    return entries if isinstance(entries, dict) else {}


def _time_of(entry: object) -> float:
    found = entry.get("time") if isinstance(entry, dict) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else 0.0
