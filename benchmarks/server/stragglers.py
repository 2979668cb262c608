"""Slow workers under the clocks of the parameter server: how much faster the same samples go through, and to what loss.

    scripts/bench server stragglers

Four workers train a small classifier on noisy labels. A part of a step is a sleep of 40 ms, so that the 5 ms of
work that a part is for all processes together hardly matter, and the real gradient. Two kinds of trouble:

    now and then      each part takes four times as long with probability 1/4, as the worker's own seed says. With bsp a
                      step takes as long as its slowest part, 122 ms on average; spread out evenly it is 70 ms: 1.75.
    for good          one worker always takes four times as long: 160 ms a step with bsp. With asp the others take over
                      its parts, 49 ms a step: 3.25.

Goals: 1.5 times the speed of bsp now and then, with a loss at most 1 % apart; 2.5 times for good.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.servers import Servers
from benchmarks.workload.steps import Steps
from benchmarks.workload.turns import forth_and_back
from shoal.exchange.ps import Ps
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

WORKERS, BATCH, SAMPLES = 4, 128, 8192
PAUSE, SLOWER, CHANCE = 0.04, 4, 0.25
FEATURES, CLASSES = 16, 8
SAME_LOSS = 0.01

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Trouble:
    """Which parts are slow, under how many steps, and what a clock must gain over bsp."""

    name: str
    now_and_then: bool
    steps: int
    clock: str
    goal: float


TROUBLES = [
    Trouble("now and then", True, 100, "ssp=4", 1.5),
    Trouble("for good", False, 60, "asp", 2.5),
]


def samples(seed: int) -> TensorDataset:
    """Labels are drawn with the probabilities that a fixed net gives: the loss has a floor well above zero."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    with torch.no_grad():
        y = torch.multinomial(F.softmax(4 * teacher(x), 1), 1, generator=generator).squeeze(1)
    return TensorDataset(x, y)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def slow_loss(rank: int, now_and_then: bool) -> Callable[[torch.Tensor, Batch], tuple[torch.Tensor, int]]:
    """A loss that takes its time."""
    drawn = random.Random(rank)

    def loss(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
        slow = drawn.random() < CHANCE if now_and_then else rank == 0
        time.sleep(PAUSE * (SLOWER if slow else 1))
        return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    return loss


def train(world: World, strategy: str, trouble: Trouble) -> tuple[float, float, float]:
    """When this worker began and ended, and the loss on samples it has not seen."""
    torch.set_num_threads(1)
    loss = slow_loss(world.rank, trouble.now_and_then)
    config = RunConfig(
        model=net, loss=loss, optimizer=sgd, data=samples(2), global_batch=BATCH, strategy=strategy
    )
    context = build(config, world, record="")[1]
    exchange = context.exchange
    assert isinstance(exchange, Ps)
    exchange.start(0, None)
    steps = Steps(context, trouble.steps)
    world.barrier()
    began = time.monotonic()
    while steps.next() is not None:
        pass
    ended = time.monotonic()
    exchange.refresh()
    x, y = samples(3).tensors
    with torch.no_grad():
        final = F.cross_entropy(context.model(x), y).item()
    world.barrier()
    exchange.close()
    return began, ended, final


def once(clock: str, trouble: Trouble) -> tuple[float, float]:
    """Seconds of all steps, and the loss after them."""
    with Servers() as job:
        found = spawn(train, WORKERS, f"ps({clock}, {job.options})", trouble, timeout=300)
    seconds = max(ended for _, ended, _ in found) - min(began for began, _, _ in found)
    return seconds, found[0][2]


def measure(turns: int) -> Iterator[Section]:
    """A table for each kind of trouble."""
    for trouble in TROUBLES:
        yield compare(trouble, turns)


def compare(trouble: Trouble, turns: int) -> Section:
    """bsp beside the clock that helps."""
    clocks = ["bsp", trouble.clock]
    seen: dict[str, list[tuple[float, float]]] = {clock: [] for clock in clocks}
    for turn in range(turns):
        for clock in forth_and_back(clocks, turn):
            seen[clock].append(once(clock, trouble))
    rows: list[Row] = []
    medians: dict[str, tuple[float, float]] = {}
    for clock, results in seen.items():
        times = [seconds * 1e3 / trouble.steps for seconds, _ in results]
        medians[clock] = (statistics.median(times), statistics.median(loss for _, loss in results))
        rows.append([f"ps({clock})", *medians[clock], " ".join(f"{time:.1f}" for time in times)])
    (slow, loss), (fast, other) = medians["bsp"], medians[trouble.clock]
    goals = [Goal(f"speed of ps({trouble.clock}) / ps(bsp)", slow / fast, trouble.goal, least=True)]
    if trouble.now_and_then:
        what = f"losses of ps({trouble.clock}) and ps(bsp) apart by"
        goals.append(Goal(what, math.fabs(other / loss - 1), SAME_LOSS))
    columns = [
        Column("contestant"),
        Column("ms a step", "{:.1f}"),
        Column("loss", "{:.4f}"),
        Column("each turn, ms"),
    ]
    title = f"slow {trouble.name}: {WORKERS} workers, {trouble.steps} steps of {BATCH} samples"
    return Section(title, columns, rows, goals)
