"""The first values of a job on several hosts: along a tree of workers, beside workers that all fetch from the servers.

    scripts/bench server first

Two servers on one host and one worker on each of seven others, all with 1 Gb/s (network namespaces; needs root). The
model has 32 MB. Measured is the time until all workers have its values, from when the first has given them to the
servers; `sent` is what left the servers' host meanwhile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time

import torch
from attended import SERVERS, Attended
from torch import nn
from torch.utils.data import TensorDataset

from shoal.bench.rates import parse_rate
from shoal.testing.hosts import INTERFACE, Hosts, make_hosts
from shoal.testing.spawn import spawn
from shoal.train.build import Order, build
from shoal.world.launch import Launch
from shoal.world.world import World

WORKERS, LAYERS, WIDTH = 7, 8, 1024
TREE, FETCH = "along a tree", "from the servers"


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch[0])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def begin(world: World, hosts: Hosts, servers: str, tree: bool) -> tuple[float, int]:
    """Seconds until all have first values, and bytes that the servers' host sent for it."""
    torch.set_num_threads(1)
    hosts.enter(world.rank + (world.rank >= SERVERS))
    order = Order(net, loss, sgd, TensorDataset(torch.randn(64, WIDTH)), 28, f"ps(bucket_mb=4, {servers})")
    exchange = build(order, World.unjoined(Launch(rank=world.rank, size=WORKERS)), record="")[1].exchange
    link = exchange.link  # type: ignore[attr-defined]
    if not tree:
        link._address = ""
    world.barrier()
    time.sleep(0.5)  # everybody has told the coordinator where it is
    if world.rank == 0:
        exchange.start(0, None)  # the others go on when the servers have the values
    before = sent_by(hosts)
    world.barrier()
    began = time.perf_counter()
    if world.rank > 0:
        exchange.start(0, None)
    world.barrier()
    seconds = time.perf_counter() - began
    total = sent_by(hosts) - before
    exchange.close()
    return seconds, total


def sent_by(hosts: Hosts) -> int:
    words = hosts.command(SERVERS, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def measure(turns: int) -> int:
    from server import verdict

    if os.geteuid():
        print("\nfirst values on several hosts: left out, which needs root to make them")
        return 0
    seconds: dict[str, list[float]] = {TREE: [], FETCH: []}
    sent: dict[str, list[int]] = {TREE: [], FETCH: []}
    with make_hosts(WORKERS + 1) as hosts:
        hosts.limit(parse_rate("1gbit"))
        for turn in range(turns):
            for name in (TREE, FETCH) if turn % 2 == 0 else (FETCH, TREE):
                with Attended(hosts=hosts) as servers:
                    found = spawn(begin, WORKERS, hosts, servers.options, name == TREE, timeout=300)
                seconds[name].append(max(each for each, _ in found))
                sent[name].append(found[0][1])
    size = 4 * LAYERS * WIDTH**2
    print(f"\nfirst values: {size / 1e6:.0f} MB, {WORKERS} workers on as many hosts, 1 Gb/s")
    print(f"{'contestant':<20} {'median ms':>10} {'sent by the servers, models':>28}")
    for name in (TREE, FETCH):
        models = statistics.median(sent[name]) / size
        print(f"{name:<20} {statistics.median(seconds[name]) * 1e3:>10.1f} {models:>28.2f}")
    ratio = statistics.median(a / b for a, b in zip(seconds[TREE], seconds[FETCH], strict=True))
    return verdict(f"{TREE} / {FETCH}", ratio, 0.75)
