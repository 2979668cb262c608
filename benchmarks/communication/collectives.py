"""The "shoal" backend beside gloo: collectives in one run, the same processes, in turns.

    scripts/bench collectives [--workers 2 4]

Goals: an all-reduce of 16 MB and of 100 MB is 2.5 times as fast as gloo with 2 workers and 3 times with 4, and no size
from 1 KB up is slower. Shoal and gloo take turns several times per size, so load from elsewhere meets both.

`limit` is a large all-reduce without its waiting: every rank adds each chunk into a slot and copies a slot out
again, all at once and all for themselves. Each element must at least be read and written so often by a rank that
sees the others' data only through memory, so gloo / limit is the best ratio the machine allows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.report.draw import size as size_of
from benchmarks.report.result import Column, Goal, Section
from shoal.world.shm.backend import register_backend
from shoal.world.shm.collectives import LINE, line_bytes
from shoal.world.shm.memory import copy

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 100 * MB)
GOALS = {2: 2.5, 4: 3.0}
"""Workers -> how many times gloo's speed a large all-reduce must have."""
TURNS = 5
SECONDS_PER_CASE = 2.4
"""For both backends together: 22 cases stay well below 90 s."""

Case = tuple[str, int, Callable[[dist.ProcessGroup], None]]
Row = tuple[int, str, int, float, float, float | None]
"""Workers, operation, bytes, median seconds of shoal and of gloo, and the limit where it is measured."""
LARGE = (16 * MB, 100 * MB)


def cases(size: int) -> list[Case]:
    """What is measured: a name, its bytes, and the call."""

    def all_reduce(tensor: torch.Tensor) -> Callable[[dist.ProcessGroup], None]:
        return lambda group: dist.all_reduce(tensor, group=group)

    whole, part = torch.zeros(16 * MB // 4), torch.zeros(16 * MB // 4 // size)
    return [
        *[("all_reduce", nbytes, all_reduce(torch.zeros(nbytes // 4))) for nbytes in SIZES],
        ("reduce_scatter", 16 * MB, lambda group: dist.reduce_scatter_tensor(part, whole, group=group)),
        ("all_gather", 16 * MB, lambda group: dist.all_gather_into_tensor(whole, part, group=group)),
    ]


def time_both(call: Callable[[dist.ProcessGroup], None], groups: list[dist.ProcessGroup]) -> list[float]:
    """Median seconds per call for each group; all ranks make the same number of calls."""
    times: list[list[float]] = [[] for _ in groups]
    repeats = 1
    for turn in range(TURNS + 1):
        for group, seen in zip(groups, times, strict=True):
            for _ in range(repeats):
                begun = time.perf_counter()
                call(group)
                seen.append(time.perf_counter() - begun)
        if turn == 0:  # warm up, and agree how often to repeat
            both = torch.tensor(sum(seen[0] for seen in times))
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            repeats = max(1, min(60, int(SECONDS_PER_CASE / TURNS / both.item())))
            times = [[] for _ in groups]
    return [statistics.median(seen) for seen in times]


def limit(nbytes: int) -> float:
    """Median seconds of the passes over memory that an all-reduce needs, with nobody to wait for."""
    chunks = torch.split(torch.zeros(nbytes // 4), LINE // 4)
    slots = torch.split(torch.zeros(line_bytes(dist.get_world_size()) // 4), LINE // 4)
    times = []
    for _ in range(12):
        dist.barrier()
        begun = time.perf_counter()
        for i, chunk in enumerate(chunks):
            slot = slots[i % len(slots)][: chunk.numel()]
            torch.add(slot, chunk, out=slot)
            copy(chunk, slot)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def worker(rank: int, size: int, meeting: str, answers: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives from version to version
    register_backend()
    dist.init_process_group("shoal", init_method=f"file://{meeting}", rank=rank, world_size=size)
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    for name, nbytes, call in cases(size):
        ours, theirs = time_both(call, groups)
        floor = limit(nbytes) if name == "all_reduce" and nbytes in LARGE else None
        if rank == 0:
            answers.put((size, name, nbytes, ours, theirs, floor))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int) -> list[Row]:
    """All cases with so many workers."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (size, str(Path(folder) / "store"), answers), nprocs=size)  # type: ignore[no-untyped-call]
    rows = []
    while not answers.empty():
        rows.append(answers.get())
    return rows


def memcpy_speed() -> float:
    """Bytes per second that one core copies, out of cache."""
    source, target = torch.zeros(64 * MB, dtype=torch.uint8), torch.zeros(64 * MB, dtype=torch.uint8)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    return 64 * MB / min(times)


def goal_of(row: Row) -> Goal:
    """How many times gloo's speed it must have."""
    size, name, nbytes, ours, theirs, _ = row
    goal = GOALS.get(size, 1.0) if name == "all_reduce" and nbytes in LARGE else 1.0
    return Goal(f"{name} of {size_of(nbytes)}, {size} workers: gloo / shoal", theirs / ours, goal, least=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many workers."""
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each number of workers; of its goals, only those that matter for training or are missed."""
    torch.set_num_threads(1)
    speed = memcpy_speed()
    note = f"one core copies {speed / 1e9:.1f} GB/s out of cache: 100 MB in {1e5 * MB / speed:.1f} ms"
    for workers in options.workers:
        found = run(workers)
        rows = [
            [
                name,
                nbytes,
                ours * 1e3,
                theirs * 1e3,
                theirs / ours,
                nbytes / ours / 1e9,
                None if floor is None else floor * 1e3,
                None if floor is None else theirs / floor,
            ]
            for _, name, nbytes, ours, theirs, floor in found
        ]
        goals = [goal for goal in map(goal_of, found) if goal.goal > 1.0 or not goal.met]
        yield Section(f"{workers} workers", COLUMNS, rows, goals, [note])


COLUMNS = (
    Column("operation"),
    Column("size", "bytes"),
    Column("shoal ms", "{:.3f}"),
    Column("gloo ms", "{:.3f}"),
    Column("gloo / shoal", "{:.2f}"),
    Column("shoal GB/s", "{:.2f}"),
    Column("limit ms", "{:.1f}"),
    Column("gloo / limit", "{:.2f}"),
)
