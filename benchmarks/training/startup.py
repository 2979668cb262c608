"""From the command to the first step, with four workers: `shoal run` beside `torchrun`, the same script, in turns.

    scripts/bench startup [--rounds 5] [--workers 32]

Goal: shoal run takes at most one second more than torchrun. With more workers, it is measured beside itself: N times as
many workers take at most N times as long.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report.result import Column, Goal, Section

GOAL = 1.0
FEW = 4
SCRIPT = """
import time, torch, shoal
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
run = shoal.Run(model=lambda: torch.nn.Linear(8, 1), loss=lambda o, b: ((o - b[1]) ** 2).mean(), data=data,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=64, log=None, progress=False)
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


def medians_of(words: Mapping[str, Sequence[str]], rounds: int) -> dict[str, float]:
    """The median time to the first step of each command, in turns."""
    times: dict[str, list[float]] = {name: [] for name in words}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for _ in range(rounds):
            for name, given in words.items():
                times[name].append(first_step([sys.executable, "-m", *given, str(script)]))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a command."""
    shoal_run = ("shoal", "run", "--workers")
    many = options.workers
    if many > FEW:
        yield _growth(medians_of({str(n): (*shoal_run, str(n)) for n in (FEW, many)}, options.rounds), many)
        return
    words = {
        "torchrun": ("torch.distributed.run", "--nproc-per-node", str(many)),
        "shoal run": (*shoal_run, str(many)),
    }
    medians = medians_of(words, options.rounds)
    goal = Goal("seconds of shoal run - torchrun", medians["shoal run"] - medians["torchrun"], GOAL)
    columns = [Column("command"), Column("to the first step", "seconds")]
    title = f"from the command to the first step of {options.workers} workers"
    yield Section(title, columns, [[name, median] for name, median in medians.items()], [goal])


def _growth(medians: Mapping[str, float], many: int) -> Section:
    """How the time grows with the number of workers."""
    times = medians[str(many)] / medians[str(FEW)]
    goal = Goal(f"time of {many} workers / time of {FEW}", times, many / FEW)
    columns = [Column("workers"), Column("to the first step", "seconds")]
    title = f"from the command to the first step of {FEW} and {many} workers"
    return Section(
        title, columns, [[name, median] for name, median in medians.items()], [goal], part="growth"
    )
