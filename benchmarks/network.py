"""Strategies between two hosts at several network rates, beside torch DDP and its hooks, with the goals checked.

    scripts/bench network                   everything; about twenty minutes on two cores; takes root
    scripts/bench network --quick           a tiny model: whether it runs; goals are printed and not held

What is measured, and how, is `shoal bench network`; its options go through. `ddp + auto` and `ddp` then meet once more
at the faster rates, where they should be the same and only many rounds can tell whether they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from shoal.bench.contestants import BASELINE
from shoal.bench.rates import show_rate
from shoal.bench.result import AtRate, Result, read_result

RATE = 100_000_000
SPEED, GAP = 6.0, 0.01
"""The best lossy strategy: so many times the speed of torch DDP, with a loss not further above it than this."""
FEWER = 150.0
SLOWER = 1.02
ROUNDS = 20
"""Of `ddp + auto` beside `ddp`."""


def measure(folder: Path, options: list[str]) -> Result:
    """Run the command; what it has written down."""
    command = [sys.executable, "-m", "shoal", "bench", "network", "--out", str(folder), *options]
    if subprocess.run(command, check=False).returncode:
        sys.exit("no goal can be checked: the command above failed")
    return read_result(folder / "network.json")


def best_lossy(result: Result, at: AtRate) -> tuple[str, float]:
    """Of our strategies whose loss is near enough, the fastest; those that lose nothing are not fast here."""
    ours = [
        n for n in result.learned if n in at.timed and not n.startswith(BASELINE) and result.gap(n) <= GAP
    ]
    return max(((name, at.speed(name)) for name in ours), key=lambda pair: pair[1], default=("nobody", 0.0))


def judge(result: Result, duel: Result | None) -> int:
    """Print each goal; how many are missed."""
    missed = 0
    for at in result.rates:
        if at.rate == RATE and result.learned:
            name, speed = best_lossy(result, at)
            what = f"{show_rate(RATE)}: {name}, at most {GAP:.0%} above torch DDP's loss, × its speed"
            missed += verdict(what, speed, SPEED, least=True)
        few = "diloco(50) + int8"
        if at.rate == RATE and {"ddp", few} <= at.timed.keys():
            ratio = at.timed["ddp"].step_bytes / at.timed[few].step_bytes
            missed += verdict(f"{show_rate(RATE)}: bytes of ddp / {few}", ratio, FEWER, least=True)
    met_again = {at.rate: at for at in duel.rates} if duel is not None else {}
    for at in result.rates:
        here = met_again.get(at.rate, at)
        if {"ddp", "ddp + auto"} <= here.timed.keys():
            ratio = here.slowdown("ddp + auto", "ddp")
            missed += verdict(f"{show_rate(at.rate)}: step time of ddp + auto / ddp", ratio, SLOWER)
    return missed


def verdict(what: str, found: float, goal: float, least: bool = False) -> bool:
    """Say whether a goal is kept; True if it is missed."""
    good = found >= goal if least else found <= goal
    print(
        f"  {'ok  ' if good else 'MISS'} {what} = {found:.3f} (goal: at {'least' if least else 'most'} {goal:g})"
    )
    return not good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="runs/network")
    parser.add_argument("--no-duel", action="store_true", help="do not let auto and ddp meet once more")
    args, options = parser.parse_known_args()
    folder = Path(args.out)
    result = measure(folder, [*options, *(["--quick"] if args.quick else [])])
    faster = [f"{at.rate / 1e9:g}gbit" for at in result.rates if at.rate > RATE]
    duel = None
    if faster and "ddp + auto" in result.names and not (args.no_duel or args.quick):
        again = ["--rates", ",".join(faster), "--strategies", "ddp, ddp + auto", "--steps", "0"]
        duel = measure(folder / "auto", [*again, "--rounds", str(ROUNDS)])
    missed = judge(result, duel)
    sys.exit(1 if missed and not args.quick else 0)


if __name__ == "__main__":
    main()
