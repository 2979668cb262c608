"""`shoal plan`, `strategy="auto"` and `--review`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import shoal, write

from shoal.plan.cache import keep
from shoal.plan.interval import Interval
from shoal.plan.machine import Added, Machine
from shoal.plan.show import span
from shoal.report.events import read_events
from shoal.train.planning.calibrate_worker import TABLES, key_of

LOOP = """
run = shoal.Run(**settings)
for step in run.steps(22):
    print(step.number, repr(step.loss), flush=True)
"""
SMALL = [Added(1000, 4, 1000.0, Interval.exact(1e-3)), Added(10**7, 4, 1e7, Interval.exact(1e-2))]


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was measured before: to measure one takes 20 s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    added = dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "shared"), SMALL)
    made = Machine(2, 2, added, [(1024, 1e-5)], 1e10)
    assert keep(TABLES, key_of(2), {"machine": made.to_json()})


def test_a_plan_a_choice_and_a_review(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    planned = shoal(tmp_path, "plan", "train.py", "--workers", "2", "--json", "--exact")
    assert planned.code == 0, planned.err
    found = json.loads(planned.out)
    names = [plan["strategy"] for plan in found["plans"]]
    assert {"ddp", "zero3", "shared"} <= set(names)
    assert {plan["promise"] for plan in found["plans"]} == {"EXACT"}
    assert "solo is one process alone" in found["refused"]["solo"]

    chosen = shoal(tmp_path, "run", "--workers", "2", "--strategy", "auto(tries=2, steps=2)", "train.py")
    assert chosen.code == 0, chosen.err
    assert "tried for 2 steps each" in chosen.err
    start = read_events(tmp_path / "log" / "events.jsonl")[0]
    strategy = str(start["strategy"])
    assert strategy in names
    assert start["predicted_seconds"] > 0  # type: ignore[operator]

    (memory,) = [
        event for event in read_events(tmp_path / "log" / "events.jsonl") if event.get("event") == "memory"
    ]
    measured, predicted = memory["measured"], memory["predicted"]
    assert measured["parameters"] == pytest.approx(predicted["parameters"], rel=0.05)  # type: ignore[index]
    assert predicted["peak"] == start["predicted_memory"]  # type: ignore[index]

    # As if nothing had been tried: every loss is that of a run that was given the strategy, to the last bit.
    given = shoal(tmp_path, "run", "--workers", "2", "--strategy", strategy, "train.py")
    assert given.out == chosen.out
    assert given.out.startswith("1 ")

    again = shoal(tmp_path, "run", "--workers", "2", "--strategy", "auto", "--steps", "1", "train.py")
    assert f"auto: {strategy}, which was the best for this model here before" in again.err

    reviewed = shoal(tmp_path, "plan", "--review", "log")
    assert reviewed.code == 0, reviewed.err
    assert strategy in reviewed.out
    assert span(float(start["predicted_seconds"])) in reviewed.out  # type: ignore[arg-type]


def test_wrong_questions(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    for words, sentence in (
        (["plan"], "needs a script"),
        (["plan", "train.py", "--workers", "3", "--hosts", "2"], "cannot be on 2 hosts"),
        (["plan", "train.py", "--memory", "lots"], "is no amount"),
        (["plan", "train.py", "--plot", "x.jpg"], "ends in .png"),
        (["plan", "--review", "nowhere"], "there is no events.jsonl"),
        (["plan", "--gpt", "layers=2,hidden=8,heads=2,seq=8"], "needs --cluster"),
        (["run", "--strategy", "auto * tp2", "train.py"], "write auto alone"),
    ):
        done = shoal(tmp_path, *words)
        assert done.code == 2, done.err
        assert sentence in done.err
        assert len(done.err.strip().splitlines()) == 1
