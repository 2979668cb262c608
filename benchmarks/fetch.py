"""Fresh values that come while the next forward pass runs, beside a worker that waits for all of them first.

    scripts/bench server fetch

One worker trains eight layers of 4 MB with two servers: of this host, which hand values over in memory, and of another,
at 1 Gb/s (two network namespaces; needs root). A layer is a sleep of 25 ms forward and 50 ms backward
beside its multiplication, as if the worker had a card to compute with: the cores are free for the bytes. With servers
of this host both contestants do the same, for there nothing is to be gained: they show how far the figures move.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import torch
from attended import WORKER, Attended
from torch import nn
from torch.utils.data import TensorDataset

from shoal.bench.rates import parse_rate
from shoal.exchange.ps import Ps
from shoal.testing.hosts import Hosts, make_hosts
from shoal.testing.spawn import spawn
from shoal.train.build import Order, build
from shoal.train.step import run_step
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
        return torch.tanh(Sleep.apply(super().forward(x)))


def net() -> nn.Module:
    return nn.Sequential(*(Slow(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch[0])


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def stepper(world: World, strategy: str, later: bool) -> Callable[[], None]:
    """A step each time it is called."""
    order = Order(net, loss, sgd, TensorDataset(torch.randn(64, WIDTH)), 4, strategy)
    parts, number = build(order, world, record="")[1], 0
    assert isinstance(parts.exchange, Ps)
    parts.exchange._served.later = later

    def step() -> None:
        nonlocal number
        assert parts.exchange.claim(number, 10**6) == number
        run_step(parts, number)
        number += 1

    return step


def contest(world: World, turns: int, waiting: str, meanwhile: str, hosts: Hosts | None) -> object:
    from server import take_turns

    if hosts is not None:
        hosts.enter(WORKER)
    torch.set_num_threads(1)
    makers = {
        "waiting": stepper(world, f"ps(bsp, bucket_mb=4, {waiting})", False),
        "meanwhile": stepper(world, f"ps(bsp, bucket_mb=4, {meanwhile})", True),
    }
    return take_turns(makers, turns, {}, world.barrier)


def measure(turns: int) -> int:
    from server import judge, table

    missed = 0
    for where, rate in (("of this host", ""), ("behind 1 Gb/s", "1gbit")):
        if rate and os.geteuid():
            print("\nservers of another host: left out, which needs root to make one")
            continue
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(make_hosts(2)) if rate else None
            if hosts is not None:
                hosts.limit(parse_rate(rate))
            one, two = (stack.enter_context(Attended(hosts=hosts)) for _ in range(2))
            seen = spawn(contest, 1, turns, one.options, two.options, hosts, timeout=1800)[0]
        table(f"fresh values: 32 MB, 1 worker, 2 servers {where}", seen, "waiting")
        missed += judge(seen, [("meanwhile", "waiting", 0.95 if rate else 1.03)])
    return missed
