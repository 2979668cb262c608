"""Parameter-server jobs on a simulated network, each with faults of its own: how many seeds, how fast.

    python benchmarks/simulation.py            10,000 seeds
    python benchmarks/simulation.py 500 20000  500 of them, from 20,000 on

Jobs have every clock, some two of them, some with backup. Each loses a server to `kill -9` if it lasts long enough;
some lose the coordinator or workers too, the coordinator often between two messages of one view, or have processes
that stop or hang for seconds, or a network that loses, doubles, delays and reorders messages. After each, all
acknowledged updates must be there once on every copy, parts that were left out not at all, and all reads fit one
order of events. A seed that fails is named, and replays alike. Ends with exit code 1 if one fails, or if 10,000 seeds
take more than ten minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time

from shoal.errors import ServerRefused
from shoal.testing.scenario import Tide, check
from shoal.testing.shape import shape_of

GOAL = 600.0
"""Seconds for 10,000 seeds."""


def run(seed: int) -> tuple[int, str, int, int, float, int]:
    """One job: its seed, what broke, servers killed, messages sent, the longest wait of a worker for an answer, and
    coordinators that ended within a view."""
    tide = Tide(shape_of(seed))
    try:
        tide.run()
        check(tide)
        problem = ""
    except (AssertionError, ServerRefused) as error:
        problem = str(error)
    history = tide.history
    return seed, problem, history.kills, tide.network.messages, history.longest, history.cuts


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool(len(os.sched_getaffinity(0))) as pool:
        found = []
        for number, result in enumerate(
            pool.imap_unordered(run, range(first, first + seeds), chunksize=50), 1
        ):
            found.append(result)
            if number % 1000 == 0:
                print(f"{number} seeds, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    took = time.perf_counter() - began
    broken = sorted(seed for seed, problem, *_ in found if problem)
    kills = sum(row[2] for row in found)
    messages = sum(row[3] for row in found)
    cuts = sum(row[5] for row in found)
    print(f"{seeds} seeds in {took:.0f} s: {kills} servers killed, {messages / 1e6:.1f} million messages")
    print(f"coordinators killed between two messages of a view: {cuts}")
    print(f"longest wait for an answer, simulated: median {statistics.median(row[4] for row in found):.2f} s")
    for seed, problem, *_ in sorted(found):
        if problem:
            print(f"seed {seed}: {problem}")
    fast = took / seeds * 10_000 <= GOAL
    print(f"{'ok' if not broken else 'missed'}   broken invariants = {len(broken)} (goal 0)")
    print(f"{'ok' if fast else 'missed'}   10,000 seeds = {took / seeds * 10_000:.0f} s (goal {GOAL:.0f})")
    sys.exit(0 if fast and not broken else 1)


if __name__ == "__main__":
    main()
