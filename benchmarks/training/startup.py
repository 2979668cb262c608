"""From the command to the first step, with four workers: `shoal run` beside `torchrun`, the same script, in turns.

    scripts/bench startup [--rounds 5]

Goal: shoal run takes at most one second more than torchrun.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report.result import Column, Goal, Section

GOAL = 1.0
SCRIPT = """
import time, torch, shoal
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
run = shoal.Run(model=lambda: torch.nn.Linear(8, 1), loss=lambda o, b: ((o - b[1]) ** 2).mean(), data=data,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=16, log=None, progress=False)
for step in run.steps(1):
    if run.world.rank == 0:
        print("first step", time.time())
"""


def first_step(command: list[str]) -> float:
    """Seconds from starting a command to the end of the first step."""
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "first step" in line)
    return float(line.split()[-1]) - begun


def add_options(parser: argparse.ArgumentParser) -> None:
    """How often, and how many workers."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a command."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        many = str(options.workers)
        words = {
            "torchrun": ["torch.distributed.run", "--nproc-per-node", many],
            "shoal run": ["shoal", "run", "--workers", many],
        }
        times: dict[str, list[float]] = {name: [] for name in words}
        for _ in range(options.rounds):
            for name, given in words.items():
                times[name].append(first_step([sys.executable, "-m", *given, str(script)]))
    medians = {name: statistics.median(t) for name, t in times.items()}
    goal = Goal("seconds of shoal run - torchrun", medians["shoal run"] - medians["torchrun"], GOAL)
    columns = [Column("command"), Column("to the first step", "seconds")]
    title = f"from the command to the first step of {options.workers} workers"
    yield Section(title, columns, [[name, median] for name, median in medians.items()], [goal])
