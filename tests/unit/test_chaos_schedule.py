"""Schedules of faults: the same for the same seed, and nothing but a schedule is read as one."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.chaos.compare import Traits, compare
from shoal.chaos.schedule import GAP, KINDS, Schedule, draw
from shoal.errors import ConfigError

COUNTS = {"kill": 5, "stop": 3, "restart": 1}


def test_a_seed_gives_one_schedule_and_another_seed_another() -> None:
    made = draw(7, 100, 4, COUNTS)
    assert made == draw(7, 100, 4, dict(reversed(COUNTS.items())))
    assert made != draw(8, 100, 4, COUNTS)
    assert Schedule.from_json(made.to_json()) == made
    assert {kind: sum(f.kind == kind for f in made.faults) for kind in COUNTS} == COUNTS
    steps = [fault.step for fault in made.faults]
    assert all(b - a >= GAP for a, b in pairwise(steps))
    assert min(steps) > 0
    assert max(steps) < 99


def test_too_short_a_run_is_refused() -> None:
    draw(1, 27, 2, {"kill": 9})
    with pytest.raises(ConfigError, match="9 faults need at least 27 steps, and this run has 20"):
        draw(1, 20, 2, {"kill": 9})


def test_changed_schedules_are_refused_or_possible(everything: bool) -> None:
    draws = random.Random(3)
    text = draw(7, 60, 3, COUNTS).to_json()
    for _ in range(100_000 if everything else 300):
        changed = list(text)
        for _ in range(draws.randint(1, 4)):
            changed[draws.randrange(len(changed))] = chr(draws.choice([*range(32, 127), 0, 8232]))
        try:
            made = Schedule.from_json("".join(changed))
        except ConfigError:
            continue
        assert all(f.kind in KINDS and 0 <= f.rank < made.workers and f.seconds < 60 for f in made.faults)


def log(folder: Path, losses: dict[int, float], again: dict[int, float] | None = None) -> Path:
    (folder / "log").mkdir(parents=True)
    lines = [{"event": "start", "strategy": "ddp"}]
    for part in (losses, again or {}):
        lines += [{"step": step, "loss": loss, "samples": 8} for step, loss in part.items()]  # type: ignore[misc]
    (folder / "log" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_was_lost_or_done_twice_is_seen(tmp_path: Path) -> None:
    """The checks themselves can fail."""
    plain = log(tmp_path / "plain", {1: 3.0, 2: 2.0, 3: 1.0})
    cases = {
        "same": ({1: 3.0, 2: 2.0, 3: 1.0}, {}, {"state"}),
        "back": ({1: 3.0, 2: 2.0}, {2: 2.0, 3: 1.0}, {"state"}),
        "lost": ({1: 3.0, 3: 1.0}, {}, {"steps", "samples", "losses", "state"}),
        "other": ({1: 3.0, 2: 2.0000001, 3: 1.0}, {}, {"losses", "state"}),
        "more": ({1: 3.0, 2: 2.0, 3: 1.0, 4: 0.5}, {}, {"steps", "samples", "state"}),
    }
    for name, (first, again, wrong) in cases.items():
        rows = compare(plain, log(tmp_path / name, first, again), Traits(by_servers=False, comparable=True))
        assert {row.name for row in rows if not row.good} == wrong, name
