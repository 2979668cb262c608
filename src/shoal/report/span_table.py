"""Spans as they were written, read back as numpy tables; a file is mapped, and only what is asked for is read.

Times come out in seconds since 1970: each process wrote the same moment on both clocks when it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.report.folder import spans_path
from shoal.report.spans import LAYOUT, RECORD, SpanKind, older

Array = npt.NDArray[Any]

DTYPE = np.dtype([("step", "<u4"), ("kind", "<u2"), ("detail", "<u2"), ("begin", "<i8"), ("duration", "<i8")])
assert DTYPE.itemsize == RECORD.size

_NOTHING = tuple(np.empty(0, kind) for kind in ("u4", "u2", "u2", "f8", "f8"))
_LONGEST_NS = 30 * 86400 * 10**9
"""A month: no span lasts longer, and a record that says so is garbage."""


@dataclass(frozen=True)
class SpanTable:
    """Spans of one rank, in the order in which they were written."""

    step: Array
    kind: Array
    detail: Array
    begin: Array
    """Seconds since 1970, float64, by the clock of the rank's host."""
    duration: Array
    """Seconds."""

    def __len__(self) -> int:
        return len(self.step)


def read_spans(folder: Path, rank: int, first: int = 0, last: int = (1 << 32) - 2) -> SpanTable:
    """Spans of the steps from `first` to `last`. Where steps were repeated after a resume, the last time counts.

    >>> len(read_spans(Path("no such folder"), 0))
    0
    """
    path = spans_path(folder, rank)
    parts = _without_repeats([part for each in (older(path), path) for part in _read(each, first, last)])
    return SpanTable(*(np.concatenate(column) for column in zip(_NOTHING, *parts, strict=True)))


def step_range(folder: Path, rank: int) -> tuple[int, int]:
    """The first and the last step of which there are spans; (0, 0) where there are none.

    >>> step_range(Path("no such folder"), 0)
    (0, 0)
    """
    path = spans_path(folder, rank)
    ends = [
        int(r["step"])
        for each in (older(path), path)
        for r in _ends(_map(each))
        if r["kind"] != SpanKind.ANCHOR
    ]
    return (min(ends), max(ends)) if ends else (0, 0)


def _map(path: Path) -> Array:
    """The records of a file, without reading them."""
    try:
        count = path.stat().st_size // RECORD.size
        return np.memmap(path, DTYPE, "r", shape=(count,)) if count else np.empty(0, DTYPE)
    except OSError:
        return np.empty(0, DTYPE)


def _ends(table: Array) -> Array:
    """Records at both ends, among which there is one of a step."""
    near = np.concatenate([table[:8], table[-8:]])
    return near[near["step"] > 0]


Columns = tuple[Array, Array, Array, Array, Array]


def _read(path: Path, first: int, last: int) -> list[Columns]:
    """One part for each process, or each time that a process went back: within it, steps are in order."""
    table = _map(path)
    starts = np.flatnonzero((table["kind"] == SpanKind.ANCHOR) & (table["step"] == LAYOUT))
    parts = []
    for start, end in pairwise([*starts, len(table)]):
        anchor, rows = table[start], table[start + 1 : end]
        low, high = np.searchsorted(rows["step"], [first, last + 1])
        rows = rows[low:high]
        good = (rows["kind"] > 0) & (rows["kind"] <= max(SpanKind)) & (rows["duration"] >= 0)
        good &= (rows["duration"] < _LONGEST_NS) & (rows["begin"] > 0) & (rows["step"] > 0)
        rows = rows[good]
        offset = (int(anchor["duration"]) - int(anchor["begin"])) * 1e-9
        begin = rows["begin"] * 1e-9 + offset
        parts.append((rows["step"], rows["kind"], rows["detail"], begin, rows["duration"] * 1e-9))
    return parts


def _without_repeats(parts: list[Columns]) -> list[Columns]:
    """What a later part has done again counts there."""
    kept: list[Columns] = []
    reached = (1 << 32) - 1
    for part in reversed(parts):
        still = part[0] < reached
        kept.append(tuple(column[still] for column in part))  # type: ignore[arg-type]
        reached = min(reached, int(part[0].min(initial=reached)))
    return kept[::-1]
