"""The first values of a job on several hosts: along a tree of workers, beside workers that all fetch from the servers.

    scripts/bench server first

Two servers on one host and one worker on each of seven others, all with 1 Gb/s (network namespaces; needs root). The
model has 32 MB. Measured is the time until all workers have its values, from when the first has given them to the
servers; `sent` is what left the servers' host meanwhile. Goal: at most 0.75 times as long along the tree.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.server.fetch import LAYERS, WIDTH, loss, sgd
from benchmarks.workload.rates import parse_rate
from benchmarks.workload.servers import SERVERS, Servers
from benchmarks.workload.turns import forth_and_back
from shoal.exchange.ps import Ps
from shoal.testing.hosts import INTERFACE, Hosts, make_hosts
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.launch import Launch
from shoal.world.world import World

WORKERS = 7
TREE, FETCH = "along a tree", "from the servers"


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def begin(world: World, hosts: Hosts, servers: str, tree: bool) -> tuple[float, int]:
    """Seconds until all have first values, and bytes that the servers' host sent for it."""
    torch.set_num_threads(1)
    hosts.enter(world.rank + (world.rank >= SERVERS))
    strategy = f"ps(bucket_mb=4, {servers})"
    data = TensorDataset(torch.randn(64, WIDTH))
    config = RunConfig(model=net, loss=loss, optimizer=sgd, data=data, global_batch=28, strategy=strategy)
    exchange = build(config, World.unjoined(Launch(rank=world.rank, size=WORKERS)), record="")[1].exchange
    assert isinstance(exchange, Ps)
    if not tree:
        exchange.link._address = ""
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
    """Bytes that have left the servers' host so far."""
    words = hosts.command(SERVERS, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def measure(turns: int) -> Iterator[Section]:
    """One table."""
    nbytes = 4 * LAYERS * WIDTH**2
    title = f"first values: {nbytes / 1e6:.0f} MB, {WORKERS} workers on as many hosts, 1 Gb/s"
    if os.geteuid():
        yield Section(title, notes=["left out: only root can make other hosts"])
        return
    seconds: dict[str, list[float]] = {TREE: [], FETCH: []}
    sent: dict[str, list[int]] = {TREE: [], FETCH: []}
    with make_hosts(WORKERS + 1) as hosts:
        hosts.limit(parse_rate("1gbit"))
        for turn in range(turns):
            for name in forth_and_back(list(seconds), turn):
                with Servers(hosts=hosts) as servers:
                    found = spawn(begin, WORKERS, hosts, servers.options, name == TREE, timeout=300)
                seconds[name].append(max(each for each, _ in found))
                sent[name].append(found[0][1])
    rows: list[Row] = [
        [name, statistics.median(seconds[name]) * 1e3, statistics.median(sent[name]) / nbytes]
        for name in seconds
    ]
    ratio = statistics.median(a / b for a, b in zip(seconds[TREE], seconds[FETCH], strict=True))
    columns = [
        Column("contestant"),
        Column("median ms", "{:.1f}"),
        Column("sent by the servers, models", "{:.2f}"),
    ]
    yield Section(title, columns, rows, [Goal(f"{TREE} / {FETCH}", ratio, 0.75)])
