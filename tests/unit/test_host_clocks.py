"""What `shoal status` says of clocks, from a log that may hold anything."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rich.console import Console

from shoal.cli.status import _table
from shoal.report.folder import state_path
from shoal.report.host_clocks import clock_sentences
from shoal.report.state import read_states

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


STATE = {
    "schema": 1,
    "rank": 0,
    "workers": 2,
    "host": "a",
    "pid": 7,
    "born": 1.5,
    "device": "cpu",
    "strategy": "ddp",
    "steps": 10,
    "state": "running",
    "why": "",
    "step": 3,
    "doing": "step 3, loading data",
    "phase": "data",
    "since": 1.0,
    "written": 2.0,
    "memory": 1 << 20,
    "loss": 0.5,
    "seconds": 0.01,
    "samples_per_second": 8.0,
}


def test_state_files_may_hold_anything(tmp_path: Path, everything: bool) -> None:
    """Half of the changes leave JSON with values that no rank would write; the other half are bytes of any kind."""
    draws, line = random.Random(6), bytearray(json.dumps(STATE).encode())
    odd = (None, True, -1, 10**30, 1e308, "", "\x1b[2J" * 99, [], {}, [[]])
    for turn in range(20_000 if everything else 60):
        changed = bytearray(line)
        if turn % 2:
            given: dict[str, object] = dict(STATE)
            for _ in range(3):
                given[draws.choice(list(STATE))] = draws.choice(odd)
            changed = bytearray(json.dumps(given).encode())
        else:
            for _ in range(draws.randint(1, 5)):
                changed[draws.randrange(len(changed))] = draws.randrange(256)
        state_path(tmp_path, 0).write_bytes(bytes(changed))
        states = read_states(tmp_path)
        if states:
            with (tmp_path / "shown").open("w") as shown:
                Console(file=shown, width=120).print(_table(states))
            assert "\x1b" not in (tmp_path / "shown").read_text()
