"""The "shoal" backend beside gloo, one run, the same processes, in turns.

    OMP_NUM_THREADS=1 python benchmarks/collectives.py [--workers 2 4]

Prints the median time of each size and the ratio gloo / shoal; ends with code 1 if a goal is missed. The
goals: an all-reduce of 16 MB and 100 MB is 2.5 times as fast as gloo with 2 workers and 3 times with 4, and
no size from 1 KB up is slower. Shoal and gloo take turns several times per size, so load from elsewhere meets
both.

`limit` is a large all-reduce without its waiting: every rank adds each chunk into a slot and copies a slot out
again, all at once and all for themselves. Each element must at least be read and written so often by a rank that
sees the others' data only through memory, so gloo / limit is the best ratio the machine allows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shoal.world.memory import copy
from shoal.world.shm import register_backend
from shoal.world.shm_ops import LINE, line_bytes

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


def measure(call: Callable[[dist.ProcessGroup], None], groups: list[dist.ProcessGroup]) -> list[float]:
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
    chunks = torch.zeros(nbytes // 4).split(LINE // 4)
    slots = torch.zeros(line_bytes(dist.get_world_size()) // 4).split(LINE // 4)
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


def worker(rank: int, size: int, meeting: str, answers: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives from version to version
    register_backend()
    dist.init_process_group("shoal", init_method=f"file://{meeting}", rank=rank, world_size=size)
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    for name, nbytes, call in cases(size):
        ours, theirs = measure(call, groups)
        floor = limit(nbytes) if name == "all_reduce" and nbytes in LARGE else None
        if rank == 0:
            answers.put((size, name, nbytes, ours, theirs, floor))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int) -> list[Row]:
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (size, str(Path(folder) / "store"), answers), nprocs=size)
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


def missed(row: Row) -> str:
    """Which goal a row misses, or nothing."""
    size, name, nbytes, ours, theirs, _ = row
    goal = GOALS.get(size, 1.0) if name == "all_reduce" and nbytes in LARGE else 1.0
    return "" if theirs / ours >= goal else f"  below the goal of {goal:g}"


def line(row: Row) -> str:
    size, name, nbytes, ours, theirs, floor = row
    text = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
    times = f"{ours * 1e3:>7.3f} ms {theirs * 1e3:>7.3f} ms"
    speed = f"{theirs / ours:>6.2f}  {nbytes / ours / 1e9:>10.2f}"
    best = "" if floor is None else f"  limit {floor * 1e3:.1f} ms: {theirs / floor:.2f}"
    return f"{size:>7}  {name:<14} {text:>7} {times} {speed}{best}{missed(row)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="the shoal backend beside gloo")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    sizes: list[int] = parser.parse_args().workers
    torch.set_num_threads(1)
    speed = memcpy_speed()
    print(f"one core copies {speed / 1e9:.1f} GB/s out of cache: 100 MB in {1e5 * MB / speed:.1f} ms")
    print("workers  operation         size      shoal       gloo  ratio  shoal GB/s")
    fine = True
    for size in sizes:
        for row in run(size):
            print(line(row), flush=True)
            fine = fine and not missed(row)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
