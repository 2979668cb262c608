"""Parameter-server jobs on a simulated network, each with faults of its own: how many seeds, how fast.

    scripts/bench simulation                             10,000 seeds
    scripts/bench simulation --seeds 500 --first 20000   500 of them, from 20,000 on

Jobs have every clock, some two of them, some with backup. Each loses a server to `kill -9` if it lasts long enough;
some lose the coordinator or workers too, the coordinator often between two messages of one view, or have processes
that stop or hang for seconds, or a network that loses, doubles, delays and reorders messages. After each, all
acknowledged updates must be there once on every copy, parts that were left out not at all, and all reads fit one
order of events. A seed that fails is named, and replays alike. Goals: none fails, and 10,000 seeds take at most ten
minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks.report.result import Column, Goal, Row, Section
from shoal.errors import ServerRefused
from shoal.testing.scenario import SimulatedJob, check
from shoal.testing.shape import shape_of

GOAL = 600.0
"""Seconds for 10,000 seeds."""


def run(seed: int) -> tuple[int, str, int, int, float, int]:
    """One job: its seed, what broke, servers killed, messages sent, the longest wait of a worker for an answer, and
    coordinators that ended within a view."""
    job = SimulatedJob(shape_of(seed))
    try:
        job.run()
        check(job)
        problem = ""
    except (AssertionError, ServerRefused) as error:
        problem = str(error)
    history = job.history
    return seed, problem, history.kills, job.network.messages, history.longest, history.cuts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which seeds."""
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """All seeds, on all cores."""
    seeds, first = options.seeds, options.first
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
    broken = [f"seed {seed}: {problem}" for seed, problem, *_ in sorted(found) if problem]
    rows: list[Row] = [
        ["seeds", seeds],
        ["seconds", round(took)],
        ["servers killed", sum(row[2] for row in found)],
        ["messages", sum(row[3] for row in found)],
        ["coordinators killed between two messages of a view", sum(row[5] for row in found)],
    ]
    wait = statistics.median(row[4] for row in found)
    goals = [
        Goal("broken invariants", len(broken), 0),
        Goal("seconds for 10,000 seeds", took / seeds * 10_000, GOAL),
    ]
    notes = [f"longest wait for an answer, simulated: median {wait:.2f} s", *broken]
    yield Section(
        "jobs on a simulated network", [Column("what"), Column("count", "{:,}")], rows, goals, notes
    )
