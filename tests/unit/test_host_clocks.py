"""What `shoal status` says of clocks, from a log that may hold anything."""

from __future__ import annotations

import json
import random
from pathlib import Path

from shoal.report.host_clocks import clock_sentences

CLOCK = {
    "event": "clock",
    "time": 1.0,
    "host": "node2",
    "offset": -90.04,
    "error": 0.0004,
    "reference": "node1",
}


def said(folder: Path, *lines: bytes) -> list[str]:
    (folder / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return clock_sentences(folder)


def test_the_newest_measurement_of_each_host_counts(tmp_path: Path) -> None:
    lines = [CLOCK, {**CLOCK, "host": "node3", "offset": 0.002}, {**CLOCK, "offset": 3.0}]
    found = said(tmp_path, *(json.dumps(line).encode() for line in lines))
    assert found == ["the clock of node2 is 3.0 s behind that of the first host"]


def test_anything_else_is_not_read(tmp_path: Path, everything: bool) -> None:
    for value in (None, True, "x", [], float("nan"), 1e300, {}):
        assert said(tmp_path, json.dumps({**CLOCK, "offset": value}).encode()) == []
    draws, line = random.Random(5), bytearray(json.dumps(CLOCK).encode())
    for _ in range(50_000 if everything else 200):
        changed = bytearray(line)
        for _ in range(draws.randint(1, 5)):
            changed[draws.randrange(len(changed))] = draws.randrange(256)
        said(tmp_path, bytes(changed))
