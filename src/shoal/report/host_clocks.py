"""How far the wall clocks of a run's hosts are apart, from its log."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from shoal.report.folder import events_path
from shoal.report.follow import parse

HEAD = 1 << 18
"""Bytes: hosts compare their clocks after the first steps, so that this much of a log of any size is enough."""
APART_SECONDS = 0.1


def clock_sentences(folder: Path) -> list[str]:
    """One for each host whose clock is apart from that of the first host; the newest measurement counts.

    >>> clock_sentences(Path("no such folder"))
    []
    """
    try:
        with events_path(folder, 0).open("rb") as log:
            lines = log.read(HEAD).split(b"\n")[:-1]
    except OSError:
        return []
    found: dict[str, float] = {}
    for line in lines:
        event = parse(line) if b'"clock"' in line else None
        offset = event.get("offset") if event is not None else None
        if event is None or event.get("event") != "clock" or isinstance(offset, bool | str) or offset is None:
            continue
        if isinstance(offset, int | float) and abs(offset) < 1e12 and isfinite(offset):
            found[str(event.get("host", ""))[:100]] = float(offset)
    return [
        f"the clock of {host} is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} that of the first host"
        for host, offset in found.items()
        if abs(offset) > APART_SECONDS
    ]
