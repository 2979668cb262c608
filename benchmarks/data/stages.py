"""A job of three stages of equal work, one after the other and all at once.

    scripts/bench stages

The same script with and without `--preparers 1 --evaluators 1`: parts of a store are made, trained on, and checkpoints
measured, each stage so many seconds of one core's time. Alone, the one worker does all of it. Contestants alternate;
the figure is the time from start to end on two cores. Losses must be equal to the last bit.

Goal: 0.7 of the time of one after the other.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report.result import Column, Goal, Section
from benchmarks.workload.children import environment, python
from benchmarks.workload.turns import forth_and_back
from shoal.report.events import last_pass, read_events

PARTS, STEPS = 12, 4
SCRIPT = """
import time, numpy as np, torch, shoal
from shoal.data import PreparedStore


def work(seconds):  # of a core, however many others want it
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(2000))


def prepare(part):
    work(EACH)
    return {"x": np.random.default_rng(part).standard_normal(64).astype("f4")}


class Net(torch.nn.Linear):
    def forward(self, x):
        work(EACH / STEPS)
        return super().forward(x)


run = shoal.Run(
    model=lambda: Net(1, 1), loss=lambda output, batch: ((output[:, 0] - 2 * batch[0]) ** 2).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01), inputs=lambda batch: batch[0][:, None],
    data=PreparedStore("store", prepare, rows=64, samples=64 * PARTS, columns=("x",)), global_batch=64 // STEPS,
    validation=torch.utils.data.TensorDataset(torch.ones(64)), checkpoint="runs", checkpoint_every=STEPS,
    progress=False)
for step in run.steps("1ep"):
    pass
"""
COMMANDS = {
    "one after the other": ("--workers", "1"),
    "at once": ("--workers", "1", "--preparers", "1", "--evaluators", "1"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much work."""
    parser.add_argument("--seconds", type=float, default=0.6, help="of work for each part, in each stage")
    parser.add_argument("--turns", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One table."""
    seen: dict[str, list[float]] = {name: [] for name in COMMANDS}
    found = set()
    for turn in range(options.turns):
        for name in forth_and_back(list(COMMANDS), turn):
            seconds, losses = _run(options.seconds, *COMMANDS[name])
            seen[name].append(seconds)
            found.add(losses)
    assert len(found) == 1, "losses differ"
    medians = {name: statistics.median(times) for name, times in seen.items()}
    first, second = medians.values()
    rows = [[name, seconds, seconds / first] for name, seconds in medians.items()]
    columns = [
        Column("three stages"),
        Column("start to end", "seconds"),
        Column("time / one after the other", "{:.2f} ×"),
    ]
    note = f"{PARTS} parts, {options.seconds:g} s of a core for each in each stage; losses are equal to the last bit."
    yield Section("stages", columns, rows, [Goal("time / one after the other", second / first, 0.7)], [note])


def _run(seconds: float, *words: str) -> tuple[float, tuple[object, ...]]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    try:
        (folder / "train.py").write_text(f"PARTS, STEPS, EACH = {PARTS}, {STEPS}, {seconds}\n{SCRIPT}")
        command = python("shoal", "run", "--threads", "1", *words, "train.py")
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
        passed = time.perf_counter() - began
        events = last_pass(read_events(folder / "runs" / "events.jsonl"))
        return passed, tuple(event["loss"] for event in events)
    finally:
        shutil.rmtree(folder)
