"""Collectives on two levels beside plain gloo: two hosts of two workers, on a cable of 1 Gb/s.

    scripts/bench levels [--rate 1gbit] [--workers 2] [--sizes 16384 … 16777216]

Two network namespaces stand for the hosts (root needed). In one run and in the same processes the two take turns;
shown are the median time, and the bytes that left the first host, read from its interface. Goals, for 16 MB: no
collective is slower than plain gloo or sends more between hosts; a reduce-scatter, an all-gather and a broadcast send
at most 0.6 of its bytes, an all-reduce at most 0.75.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.report.draw import size as size_of
from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.children import environment, python
from benchmarks.workload.rates import parse_rate
from shoal.errors import ShoalError
from shoal.testing.hosts import Hosts, address_of, make_hosts
from shoal.world.launch import Launch
from shoal.world.world import Handle, World

KB, MB = 1 << 10, 1 << 20
SIZES = (16 * KB, 64 * KB, 256 * KB, MB, 16 * MB)
GOALS = {"all_reduce": 0.75, "reduce_scatter": 0.6, "all_gather": 0.6, "broadcast": 0.6}
"""The bytes between hosts, as a share of plain gloo's, at 16 MB."""
TURNS = 7
SECONDS = 4.0
"""For one case, both ways together."""
PORT = 29619

Call = Callable[[World], Handle]


def cases(size: int, nbytes: int) -> dict[str, Call]:
    """What is measured."""
    count = nbytes // 4 // size * size
    whole, part = torch.zeros(count), torch.zeros(count // size)
    return {
        "all_reduce": lambda world: world.all_reduce(whole),
        "reduce_scatter": lambda world: world.reduce_scatter(part, whole),
        "all_gather": lambda world: world.all_gather(whole, part),
        "broadcast": lambda world: world.broadcast(whole, 0),
    }


def sent() -> int:
    """Bytes that have left this host so far."""
    names = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    return sum(int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) for name in names)


def time_both(call: Call, worlds: list[World]) -> list[tuple[float, float]]:
    """Median seconds and mean bytes of a call in each world, which take turns."""
    times: list[list[float]] = [[] for _ in worlds]
    moved = [0 for _ in worlds]
    repeats = 1
    for turn in range(TURNS + 1):
        for number, world in enumerate(worlds):
            worlds[0].barrier()
            before = sent()
            for _ in range(repeats):
                begun = time.perf_counter()
                call(world).wait()
                times[number].append(time.perf_counter() - begun)
            worlds[0].barrier()  # a few hundred bytes
            moved[number] += sent() - before
        if turn == 0:  # warm up, and agree how often to repeat
            slowest = float(worlds[0].gather_numbers([sum(map(sum, times))]).max())
            repeats = max(1, min(50, int(SECONDS / TURNS / slowest)))
            times, moved = [[] for _ in worlds], [0 for _ in worlds]
    return [(statistics.median(seen), total / len(seen)) for seen, total in zip(times, moved, strict=True)]


def work(rank: int, workers: int, sizes: list[int]) -> None:
    """One worker; the first prints what it finds, one JSON line a case."""
    torch.set_num_threads(1)
    at = f"tcp://{address_of(0)}:{PORT}"
    world = World.open(Launch(rank, 2 * workers, rank % workers, workers, at, f"host{rank // workers}"))
    plain = world.wire()
    for nbytes in sizes:
        for name, call in cases(world.size, nbytes).items():
            found = time_both(call, [plain, world])
            if rank == 0:
                print(json.dumps([name, nbytes, *found]), flush=True)
    world.barrier()
    world.close()


def start(hosts: Hosts, workers: int, sizes: list[int]) -> list[subprocess.Popen[str]]:
    """All workers, each on its host."""
    processes = []
    for rank in range(2 * workers):
        words = python("benchmarks.communication.levels", str(rank), str(workers), *map(str, sizes))
        command = hosts.command(rank // workers, *words)
        given = environment({"SHOAL_HOST": f"host{rank // workers}"})
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, stdout=output, text=True, env=given))
    return processes


Found = tuple[str, int, tuple[float, float], tuple[float, float]]
"""Collective, size, and seconds and bytes of plain gloo and of two levels."""


def goals_of(row: Found) -> list[Goal]:
    """Two for each large one."""
    name, nbytes, (plain, before), (ours, after) = row
    if nbytes < 16 * MB:
        return []
    what = f"{name} of {size_of(nbytes)}"
    return [
        Goal(f"{what}: time / gloo's", ours / plain, 1.0),
        Goal(f"{what}: bytes / gloo's", after / before, GOALS[name]),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The cable, the workers, and what they send."""
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a collective and size."""
    found: list[Found] = []
    with make_hosts(2) as hosts:
        hosts.limit(parse_rate(options.rate))
        processes = start(hosts, options.workers, options.sizes)
        try:
            assert processes[0].stdout is not None
            found += [json.loads(line) for line in processes[0].stdout]
            codes = [process.wait(60) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise ShoalError(
            f"no goal can be checked: the workers ended with codes {codes}, and what they said is above."
        )
    rows: list[Row] = [
        [name, nbytes, plain * 1e3, ours * 1e3, plain / ours, before / MB, after / MB, after / before]
        for name, nbytes, (plain, before), (ours, after) in found
    ]
    goals = [goal for row in found for goal in goals_of(row)]
    note = "bytes: out of the first host, for each call"
    yield Section(f"2 hosts of {options.workers} workers, {options.rate}", COLUMNS, rows, goals, [note])


COLUMNS = (
    Column("collective"),
    Column("size", "bytes"),
    Column("gloo ms", "{:.2f}"),
    Column("levels ms", "{:.2f}"),
    Column("gloo / levels", "{:.2f}"),
    Column("gloo MB", "{:.3f}"),
    Column("levels MB", "{:.3f}"),
    Column("share", "{:.2f}"),
)


if __name__ == "__main__":  # a worker, in its namespace
    work(int(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
