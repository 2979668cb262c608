"""How fast the global order gives sample ids, and what it costs to begin in the middle of an epoch.

    scripts/bench order

Goal: every size gives at least 10 million ids a second on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from benchmarks.report.result import Column, Goal, Section
from shoal.data.order import GlobalOrder

LEAST_IDS_PER_SECOND = 10e6
SIZES = (10**6, 10**8, 2**29 + 1, 10**9, 10**12)
"""2**29 + 1 is where a domain of whole bits would be nearly twice too large."""
COUNT = 1_000_000
BATCH = 256


def ids_per_second(order: GlobalOrder) -> float:
    """The best of five runs over the last million positions of an epoch."""
    best = float("inf")
    for epoch in range(5):
        began = time.perf_counter()
        order.ids(epoch, order.num_samples - COUNT, order.num_samples)
        best = min(best, time.perf_counter() - began)
    return COUNT / best


def seek_seconds(order: GlobalOrder) -> float:
    """The mean time of one batch at scattered places of scattered epochs."""
    places = [(order.num_samples - BATCH) * number // 99 for number in range(100)]
    began = time.perf_counter()
    for epoch, place in enumerate(places):
        order.ids(epoch, place, place + BATCH)
    return (time.perf_counter() - began) / len(places)


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""
    del parser


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a size."""
    del options
    columns = [
        Column("samples", "{:,}"),
        Column("million ids/s", "{:.1f}"),
        Column(f"seek + {BATCH} ids", "seconds"),
    ]
    orders = [GlobalOrder(size, seed=0) for size in SIZES]
    rows = [[order.num_samples, ids_per_second(order) / 1e6, seek_seconds(order)] for order in orders]
    slowest = min(speed for _, speed, _ in rows)
    goals = [Goal("million ids/s of the slowest", slowest, LEAST_IDS_PER_SECOND / 1e6, least=True)]
    yield Section("the global order of samples, one core", columns, rows, goals)
