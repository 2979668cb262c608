"""Collectives on two levels beside plain gloo: two hosts of two workers, on a cable of 1 Gb/s.

    OMP_NUM_THREADS=1 python benchmarks/levels.py [--rate 1gbit] [--workers 2] [--sizes 16384 … 16777216]

Two network namespaces stand for the hosts (root needed). In one run and in the same processes the two take turns;
printed are the median time, and the bytes that left the first host, read from its interface. Ends with code 1 if a
goal is missed. The goals, for 16 MB: no collective is slower than plain gloo or sends more between hosts; a
reduce-scatter, an all-gather and a broadcast send at most 0.6 of its bytes, an all-reduce at most 0.75.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.bench.rates import parse_rate
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


def measure(call: Call, worlds: list[World]) -> list[tuple[float, float]]:
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
    torch.set_num_threads(1)
    at = f"tcp://{address_of(0)}:{PORT}"
    world = World.open(Launch(rank, 2 * workers, rank % workers, workers, at, f"host{rank // workers}"))
    plain = world.wire()
    for nbytes in sizes:
        for name, call in cases(world.size, nbytes).items():
            found = measure(call, [plain, world])
            if rank == 0:
                print(json.dumps([name, nbytes, *found]), flush=True)
    world.barrier()
    world.close()


def run(hosts: Hosts, workers: int, sizes: list[int]) -> list[subprocess.Popen[str]]:
    processes = []
    for rank in range(2 * workers):
        words = [sys.executable, __file__, "--rank", str(rank), "--workers", str(workers)]
        command = hosts.command(rank // workers, *words, "--sizes", *map(str, sizes))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_HOST": f"host{rank // workers}"}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, stdout=output, text=True, env=environment))
    return processes


def show(row: tuple[str, int, tuple[float, float], tuple[float, float]]) -> bool:
    """Print a line; whether its goals are reached."""
    name, nbytes, (plain, before), (ours, after) = row
    large = nbytes >= 16 * MB
    text = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
    fine = not large or (ours <= plain and after <= GOALS[name] * before)
    print(
        f"{name:<14} {text:>7} {plain * 1e3:>9.2f} ms {ours * 1e3:>8.2f} ms {plain / ours:>6.2f} "
        f"{before / MB:>9.3f} MB {after / MB:>8.3f} MB {after / before:>6.2f}{'' if fine else '  misses its goal'}",
        flush=True,
    )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description="collectives on two levels beside plain gloo")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank >= 0:
        work(asked.rank, asked.workers, asked.sizes)
        return 0
    fine = True
    with make_hosts(2) as hosts:
        hosts.limit(parse_rate(asked.rate))
        print(
            f"2 hosts of {asked.workers} workers, {asked.rate}; bytes: out of the first host, for each call"
        )
        print("collective        size        gloo      levels  ratio       gloo      levels  share")
        processes = run(hosts, asked.workers, asked.sizes)
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                fine = show(json.loads(line)) and fine
            fine = all(process.wait(60) == 0 for process in processes) and fine
        finally:
            for process in processes:
                process.kill()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
