"""`shoal sweep`: what it tries, which trials go on, and a whole sweep on the local queue."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import SCRIPT, SOURCE

from shoal.errors import ConfigError
from shoal.jobs.engine import Engine, JobState
from shoal.jobs.job import JobSpec
from shoal.jobs.local import lock, scheduler
from shoal.jobs.sweep import drive
from shoal.jobs.sweep.drive import Sweep, run_sweep
from shoal.jobs.sweep.grid import parse_axis, trials_of
from shoal.jobs.sweep.results import read_reached
from shoal.jobs.sweep.state import SweepState, read_state

TRAIN = (
    SCRIPT
    + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
run = shoal.Run(**{**settings, "optimizer": lambda p: torch.optim.SGD(p, lr=args.lr)})
for step in run.steps(4):
    run.log({"half": step.loss / 2})
"""
)


def test_values_are_lists_and_ranges_and_brackets_hold_commas_together() -> None:
    assert parse_axis("schedule=cosine(warmup=1, low=0),constant").values == (
        "cosine(warmup=1, low=0)",
        "constant",
    )
    assert parse_axis("seed=-1..1,7").values == ("-1", "0", "1", "7")
    assert len(trials_of([parse_axis("a=1..3"), parse_axis("b=x,y")])) == 6
    for text, said in (
        ("lr", "write a key and its values"),
        ("seed=4..0", "is no range"),
        ("lr=1,1", "names a value twice"),
        ("seed=0..99999", "is no range"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_axis(text)
    with pytest.raises(ConfigError, match="names a twice"):
        trials_of([parse_axis("a=1"), parse_axis("a=2")])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on paper are done when they are handed over."""
    monkeypatch.setattr(drive, "POLL_SECONDS", 0.0)


class Paper(Engine):
    """Runs a job at once, on paper: writes the log that a run with its learning rate would have."""

    summary = "For tests: runs nothing."

    def __init__(self) -> None:
        self.submitted: list[JobSpec] = []
        self.most = 0

    def refuse(self, spec: JobSpec) -> None:
        del spec

    def describe(self, spec: JobSpec) -> str:
        return str(spec)

    def submit(self, spec: JobSpec) -> str:
        words = dict(zip(spec.command, spec.command[1:], strict=False))
        log = next(Path(word.removeprefix("log=")) for word in spec.command if word.startswith("log="))
        log.mkdir(parents=True, exist_ok=True)
        steps, rate = int(words["--steps"]), float(words["--lr"])
        lines = [{"step": n + 1, "loss": rate if rate < 9 else math.nan} for n in range(steps)]
        (log / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.submitted.append(spec)
        return str(len(self.submitted))

    def jobs(self) -> list[JobState]:
        return [JobState(str(n + 1), "", "done", 1) for n in range(len(self.submitted))]

    def logs(self, job: str, follow: bool) -> Iterator[str]:
        del job, follow
        yield ""

    def cancel(self, job: str) -> None:
        del job


def sweep_of(folder: Path, **more: object) -> Sweep:
    trials = trials_of([parse_axis("lr=1..9")])
    made = Sweep(JobSpec(("train.py",)), trials, folder, frozenset({"seed"}), steps=90, halving=3, at_once=2)
    return replace(made, **more)  # type: ignore[arg-type]


def test_successive_halving_keeps_the_best_and_gives_them_more_steps(tmp_path: Path) -> None:
    engine, state = Paper(), SweepState(["x"])
    outcome = run_sweep(sweep_of(tmp_path), engine, state, print)
    given = [spec.command[spec.command.index("--steps") + 1] for spec in engine.submitted]
    assert given == ["10"] * 9 + ["30"] * 3 + ["90"]
    assert outcome.best("min")[:3] == ["lr=1", "lr=2", "lr=3"]
    assert outcome.reached["lr=9"].steps == 10
    assert math.isnan(outcome.reached["lr=9"].value), "a loss that is no number loses"
    run_sweep(sweep_of(tmp_path), engine, read_state(tmp_path, ["x"]), print)
    assert len(engine.submitted) == 13, "what was done is not done again"
    with pytest.raises(ConfigError, match="belongs to another sweep"):
        read_state(tmp_path, ["y"])


def test_a_metric_that_nobody_logs_ends_the_sweep_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trial has a value of 'accuracy'"):
        run_sweep(sweep_of(tmp_path, metric="accuracy"), Paper(), SweepState([]), print)


@pytest.mark.all_only
def test_a_sweep_on_the_local_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    (tmp_path / "train.py").write_text(TRAIN)
    queue = tmp_path / "queue"
    command = [sys.executable, "-m", "shoal", "sweep", "train.py", "--set", "lr=0.5,0.01", "--metric", "half"]
    command += ["--jobs", "2", "--folder", "trials", "--queue", str(queue)]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    try:
        done = run()
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].split() == ["lr", "steps", "half", "state"]
        best, other = (line.split() for line in lines[1:3])
        assert (best[2], best[4], other[2], other[4]) == ("4", "done", "4", "done")
        reached = read_reached(tmp_path / "trials" / f"lr={best[1]}" / "log", "loss")
        assert float(best[3]) == pytest.approx(reached.losses[-1] / 2, rel=1e-5)
        assert float(best[3]) <= float(other[3])
        again = run()
        assert again.stdout == done.stdout, "the same command only shows it"
    finally:
        lock.end_holders(queue / scheduler.LOCK)
