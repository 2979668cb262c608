"""Fresh values that come while the next forward pass runs, beside a worker that waits for all of them first.

    scripts/bench server fetch

One worker trains eight layers of 4 MB with two servers: of this host, which hand values over in memory, and of another,
at 1 Gb/s (two network namespaces; needs root). A layer is a sleep of 25 ms forward and 50 ms backward
beside its multiplication, as if the worker had a card to compute with: the cores are free for the bytes. With servers
of this host both contestants do the same, for there nothing is to be gained: they show how far the figures move.
Goals: at most 1.03 times the waiting worker's time there, 0.95 times behind 1 Gb/s.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.report.result import Section
from benchmarks.workload.rates import parse_rate
from benchmarks.workload.servers import WORKER, Servers
from benchmarks.workload.steps import make_stepper
from benchmarks.workload.turns import Seen, goals_of_turns, section_of_turns, take_turns
from shoal.exchange.ps import Ps
from shoal.testing.hosts import Hosts, make_hosts
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

LAYERS, WIDTH, PAUSE = 8, 1024, 0.025


class Sleep(torch.autograd.Function):
    """Takes its time, twice as long on the way back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        time.sleep(PAUSE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        time.sleep(2 * PAUSE)
        return gradient


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Sleep.apply(super().forward(x)))  # type: ignore[no-untyped-call]


def net() -> nn.Module:
    return nn.Sequential(*(Slow(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch[0])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def stepper(world: World, strategy: str, later: bool) -> Callable[[], None]:
    """A step each time it is called."""
    data = TensorDataset(torch.randn(64, WIDTH))
    config = RunConfig(model=net, loss=loss, optimizer=sgd, data=data, global_batch=4, strategy=strategy)
    context = build(config, world, record="")[1]
    assert isinstance(context.exchange, Ps)
    context.exchange._transfer.later = later
    return make_stepper(context)


def contest(world: World, turns: int, waiting: str, meanwhile: str, hosts: Hosts | None) -> dict[str, Seen]:
    """Both in turns, in one worker."""
    if hosts is not None:
        hosts.enter(WORKER)
    torch.set_num_threads(1)
    makers = {
        "waiting": stepper(world, f"ps(bsp, bucket_mb=4, {waiting})", False),
        "meanwhile": stepper(world, f"ps(bsp, bucket_mb=4, {meanwhile})", True),
    }
    return take_turns(makers, turns, {}, world.barrier)


def measure(turns: int) -> Iterator[Section]:
    """A table for servers of this host, and one for those of another."""
    for where, rate in (("of this host", ""), ("behind 1 Gb/s", "1gbit")):
        title = f"fresh values: 32 MB, 1 worker, 2 servers {where}"
        if rate and os.geteuid():
            yield Section(title, notes=["left out: only root can make another host"])
            continue
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(make_hosts(2)) if rate else None
            if hosts is not None:
                hosts.limit(parse_rate(rate))
            one, two = (stack.enter_context(Servers(hosts=hosts)) for _ in range(2))
            seen = spawn(contest, 1, turns, one.options, two.options, hosts, timeout=1800)[0]
        goals = goals_of_turns(seen, [("meanwhile", "waiting", 0.95 if rate else 1.03)])
        yield replace(section_of_turns(title, seen, "waiting"), goals=goals)
