"""The queue of one host with 10,000 jobs in it: one more submitted, one decision, and how full it keeps the host.

    scripts/bench queue [--jobs 10000]

Submitting is one transaction that is on the disk when it returns. A decision is made from the queue as the scheduler
reads it. The last section compares the end of a few jobs with an optimal schedule that knows all of them.

Goals: submit <= 5 ms, decision <= 50 ms (medians); makespan <= 1.1 x the optimum, on the mean of small cases.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.report.result import Column, Goal, Section
from shoal.jobs.job import JobSpec
from shoal.jobs.local.decide import decide
from shoal.jobs.local.host import Host
from shoal.jobs.local.profile import Profile
from shoal.jobs.local.state import Amount, Queue, Running, Start, Waiting
from shoal.jobs.local.store import Store

SUBMIT_SECONDS = 0.005
DECISION_SECONDS = 0.050
MAKESPAN = 1.1
HOST = Host(64, 256 * 10**9)
REPEATS = 21
CASES = 100
CASE_HOST: Amount = (4, 0, 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long the queue is."""
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs in the queue")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """The long queue, then the small cases."""
    with tempfile.TemporaryDirectory() as folder, closing(Store(Path(folder))) as store:
        yield _long_queue(store, options.jobs)
    yield _small_cases()


def _long_queue(store: Store, jobs: int) -> Section:
    draw = random.Random(0)
    submits, reads, decisions = [], [], []
    for _ in range(jobs):
        spec = _spec(draw)
        began = time.perf_counter()
        store.add(spec, os.environ, time.time())
        submits.append(time.perf_counter() - began)
    for _ in range(REPEATS):
        began = time.perf_counter()
        queue = store.read(HOST, time.time())
        read = time.perf_counter()
        decide(queue, time.time())
        reads.append(read - began)
        decisions.append(time.perf_counter() - read)
    rows = [
        [what, statistics.median(found), max(found)]
        for what, found in (("submit", submits[-1000:]), ("read the queue", reads), ("decide", decisions))
    ]
    goals = [
        Goal("seconds to submit", statistics.median(submits[-1000:]), SUBMIT_SECONDS),
        Goal("seconds to decide", statistics.median(decisions), DECISION_SECONDS),
    ]
    columns = [Column("what"), Column("median", "seconds"), Column("longest", "seconds")]
    return Section(f"a queue of {jobs:,} jobs, on a host of {HOST.cores} cores", columns, rows, goals)


def _spec(draw: random.Random) -> JobSpec:
    workers = draw.choice([1, 2, 4, 8, 16, 32])
    return JobSpec(
        ("train.py",),
        least=workers,
        most=workers,
        memory=draw.randrange(32 * 10**9),
        seconds=draw.choice([600.0, 3600.0, draw.uniform(60, 90_000)]),
        priority=draw.choice([0, 100, 200]),
        account=draw.choice(["ann", "bob", "cy"]),
        folder="/",
    )


def _small_cases() -> Section:
    found = [_case(random.Random(seed)) for seed in range(CASES)]
    quarters = statistics.quantiles(found, n=20)
    columns = [Column("cases"), *(Column(name, "{:.3f} ×") for name in ("mean", "median", "95 %", "worst"))]
    rows = [[CASES, statistics.mean(found), statistics.median(found), quarters[-1], max(found)]]
    goals = [Goal("makespan / optimum, mean", statistics.mean(found), MAKESPAN)]
    notes = [
        "Jobs start in the order of their submission, and the optimum does not: single cases can be far from it."
    ]
    return Section("five jobs on four cores, against an optimal schedule", columns, rows, goals, notes)


def _case(draw: random.Random) -> float:
    jobs = []
    for id in range(1, 6):
        workers = draw.randint(1, 4)
        jobs.append(Waiting(id, 100, "me", 0.0, workers, workers, 1, 0, 0, draw.uniform(50, 1000)))
    return _makespan(jobs) / min(map(_in_order, itertools.permutations(jobs)))


def _makespan(jobs: list[Waiting]) -> float:
    """When the last of them ends, if each takes all of its time."""
    now = 0.0
    waiting = {job.id: job for job in jobs}
    active: list[Running] = []
    while waiting or active:
        for action in decide(Queue(CASE_HOST, tuple(waiting.values()), tuple(active)), now):
            if isinstance(action, Start):
                active.append(Running(waiting.pop(action.job), action.workers, now))
        now = min(each.started + each.job.lasts for each in active)
        active = [each for each in active if each.started + each.job.lasts > now]
    return now


def _in_order(jobs: tuple[Waiting, ...]) -> float:
    """Each as early as it fits, in this order: one of the orders gives an optimal schedule."""
    profile = Profile(CASE_HOST, 0.0)
    last = 0.0
    for job in jobs:
        start = profile.earliest(job.needs(job.least), job.lasts)
        assert start is not None
        profile.take(job.needs(job.least), start, start + job.lasts)
        last = max(last, start + job.lasts)
    return last
