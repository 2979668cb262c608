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
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        many = str(args.workers)
        commands = {
            "torchrun": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                many,
                str(script),
            ],
            "shoal run": [sys.executable, "-m", "shoal", "run", "--workers", many, str(script)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                times[name].append(first_step(command))
    medians = {name: statistics.median(t) for name, t in times.items()}
    for name, median in medians.items():
        print(f"{name:<10} {median:.2f} s to the first step of {args.workers} workers")
    more = medians["shoal run"] - medians["torchrun"]
    print(
        f"  {'ok  ' if more <= GOAL else 'MISS'} shoal run - torchrun = {more:+.2f} s (goal at most +{GOAL})"
    )
    sys.exit(0 if more <= GOAL else 1)


if __name__ == "__main__":
    main()
