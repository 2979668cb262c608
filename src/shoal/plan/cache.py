"""Small JSON files in the user's cache folder: what was measured of machines and models, how wrong predictions were.

What is read is checked before it is believed: a file that is too large, damaged, or of another make counts as empty.
Written by replacing it as a whole, so a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.balance.remembered import default_path

FORMAT = 1
LARGEST = 1 << 22
"""Bytes of a file that is read at all."""
ENTRIES = 200
"""The oldest beyond that are forgotten."""

Json = dict[str, Any]


def cache_file(name: str) -> Path:
    """Where a cache of ours is."""
    return default_path().with_name(f"plan-{name}.json")


def machine_key() -> str:
    """Names this machine, without saying which: processor, cores, host and torch."""
    facts = [
        platform.node(),
        platform.machine(),
        _processor(),
        len(os.sched_getaffinity(0)),
        torch.__version__,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def recall(name: str, key: str) -> Json:
    """What is kept under a key; empty if there is nothing to be believed.

    >>> recall("nothing", "no such key")
    {}
    """
    entry = _read(cache_file(name)).get(key)
    return entry if isinstance(entry, dict) else {}


def keep(name: str, key: str, entry: Mapping[str, object]) -> bool:
    """Keep something under a key; False where that cannot be, such as in a home that is read-only."""
    path = cache_file(name)
    entries = {**_read(path), key: {**entry, "time": time.time()}}
    newest = sorted(entries, key=lambda each: _time_of(entries[each]))[-ENTRIES:]
    text = json.dumps({"format": FORMAT, "entries": {each: entries[each] for each in newest}})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file, draft = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
    except OSError:
        return False
    try:
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        return False
    return True


def _read(path: Path) -> Json:
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
    return float(found) if isinstance(found, int | float) else 0.0
