"""Workers of different speed: how much of the possible speed-up balancing reaches, and whether it comes to rest.

    scripts/bench balance

Two workers train a small net; every sample is a pause, on the second worker 2 or 4 times as long, so that it is not the
cores of a small machine that are measured. With even shares a step takes as long as the slow worker's half. Ideally
both are ready at once: a step of N samples then takes N × pause × r / (r + 1) instead of N × pause × r / 2, a speed-up
of (r + 1) / 2. `even` is run too, and what it really takes counts.

Goals: from step 50 on `dynamic`, `predict` and `history` reach 90 % of the ideal speed-up, and shares change at most
twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.steps import Steps
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

BATCH, STEPS, SETTLED, PAUSE = 64, 90, 50, 0.002
REACHED, CHANGES = 0.9, 2
CHOICES = ("even", "static", "dynamic", "predict", "history")
JUDGED = ("dynamic", "predict", "history")


class Slow:
    """Samples that take their time."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], index % 8

    def __getitems__(self, ids: list[int]) -> list[Any]:
        time.sleep(self.pause * len(ids))
        return [self[i] for i in ids]


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(world: World, balance: str, ratio: int, cache: str) -> tuple[list[float], list[int]]:
    """The seconds of each step, and this worker's samples in it."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = cache
    data = Slow(PAUSE * (ratio if world.rank == 1 else 1))
    config = RunConfig(model=net, loss=loss, optimizer=sgd, data=data, global_batch=BATCH, balance=balance)
    context = build(config, world, record="")[1]
    steps = Steps(context)
    seconds, sizes = [], []
    world.barrier()
    last = time.perf_counter()
    for _ in range(STEPS):
        report = steps.next()
        assert report is not None
        context.balancing.after(report)
        now = time.perf_counter()
        seconds.append(now - last)
        sizes.append(context.loader.handed)
        last = now
    context.balancing.close()
    return seconds, sizes


def changes(sizes: list[int], after: int) -> int:
    """How often the share of a worker changed from a step on; all batches here are full."""
    return sum(a != b for a, b in zip(sizes[after:], sizes[after + 1 :], strict=False))


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much slower the second worker is."""
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4])


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each ratio."""
    for ratio in options.ratios:
        with tempfile.TemporaryDirectory() as cache:
            yield compare(ratio, cache)


def compare(ratio: int, cache: str) -> Section:
    """Every way of balancing, for a worker that is so many times as slow as the other."""
    even, ideal = 0.0, (ratio + 1) / 2
    rows: list[Row] = []
    goals = []
    for balance in CHOICES:
        found = spawn(train, 2, balance, ratio, cache, timeout=300)
        if balance == "history":  # the first run has written down what the second begins with
            found = spawn(train, 2, balance, ratio, cache, timeout=300)
        took = statistics.median(found[0][0][SETTLED:])
        even = even or took
        reached = (even / took) / ideal
        first = found[0][1]
        late = changes(first, SETTLED)
        shares = [f"{first[at]}/{found[1][1][at]}" for at in (0, 9, SETTLED - 1, STEPS - 1)]
        rows.append([balance, took * 1e3, even / took, reached, *shares, changes(first, 0), late])
        if balance in JUDGED:
            goals.append(Goal(f"{balance}: of the ideal speed-up", reached, REACHED, least=True))
            goals.append(Goal(f"{balance}: changes of the shares after step {SETTLED}", late, CHANGES))
    columns = [
        Column("balance"),
        Column("ms a step", "{:.1f}"),
        Column("speed-up", "{:.2f} ×"),
        Column("of the ideal", "{:.0%}"),
        *(Column(f"shares, step {step}") for step in (1, 10, SETTLED, STEPS)),
        Column("changes"),
        Column(f"after step {SETTLED}"),
    ]
    note = f"2 workers, {BATCH} samples a step, {PAUSE * 1e3:g} ms a sample; medians of steps {SETTLED} to {STEPS}"
    return Section(f"{ratio} : 1", columns, rows, goals, [note])
