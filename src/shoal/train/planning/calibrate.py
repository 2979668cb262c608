"""Measure this machine with so many workers: what each exchange adds to a step, sums, and products of matrices.

Every worker of a job calls it. Each exchange trains models of a few sizes for some steps, in turns with the same model
trained by every worker alone, so that work of others on the machine meets both alike.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import exchange
from shoal.config import degree_of, parse_strategy
from shoal.cost import Cost, ModelProfile
from shoal.errors import ShoalError
from shoal.plan.check import check_text
from shoal.plan.cost import plan_cost
from shoal.plan.interval import Interval
from shoal.plan.machine import Added, Machine
from shoal.plan.search import COMPRESSORS, written_alone
from shoal.train.build import build
from shoal.train.model.profile import profile_model
from shoal.train.planning.rehearsal import resident, settle
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.world.mesh import Mesh
from shoal.world.world import World

WORK, WALL = 14.0, 90.0
"""Seconds of a worker's own work, and by the clock, after which no other exchange is begun; the least used come last.
Alone on the machine that is some 15 s by the clock."""
SIZES = ((12, 64), (12, 448), (96, 96))
"""Models: tensors, and width of each. The last shows what a tensor costs."""
TURNS = 3
STEPS = 2


class Tower(nn.Module):
    """Square layers, each of which one sample passes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def squared(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    """A loss that costs nothing."""
    return output.square().sum(), len(batch[0])


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As most runs have it."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def calibrate(world: World, servers: bool) -> Machine:
    """Tables of this machine, with the workers of `world` at work. Collective. `servers`: whether `ps` can be run."""
    gc.collect()
    gc.freeze()  # what is here stays, and to look at it again after every model would take a third of the time
    end, work = time.monotonic() + WALL, time.process_time() + WORK
    cores = len(os.sched_getaffinity(0))
    flops = _flops(world)
    sums = _sums(world) if world.size > 1 else []
    added: dict[str, list[Added]] = {}
    code: dict[str, int] = {}
    if world.size > 1:
        for family in _families(servers):
            if world.gather_values(time.monotonic() > end or time.process_time() > work)[0]:
                break
            code[family.partition("(")[0]] = _grows(world, family)
            rows = [_added(world, family, SIZES[number]) for number in range(_sizes_of(family))]
            if all(row is not None for row in rows):
                added[family.partition("(")[0]] = sorted(
                    (row for row in rows if row is not None),
                    key=lambda row: (row.tensors > 32, row.parameters),
                )
    if world.size > 1:
        code["tp"] = _grows(world, f"ddp * tp{world.size}")
        code["pp"] = _grows(world, f"ddp * pp{world.size}(gpipe, microbatches=2)")
    microbatch = _microbatch(world) if world.size > 1 else 0.0
    gc.unfreeze()
    return Machine(world.size, cores, added, sums, flops, code, microbatch)


@lru_cache(maxsize=8)
def _profile(layers: int, width: int) -> ModelProfile:
    return profile_model(Tower(layers, width), adamw)


def _families(servers: bool) -> list[str]:
    """What is measured, the most used first."""
    names = [name for name, kind in exchange.TABLE.items() if servers or not kind.uses_servers]
    late = sorted(names, key=lambda name: exchange.TABLE[name].uses_servers)
    return [*(written_alone(name, 1) for name in late), *(f"ddp + {name}" for name in COMPRESSORS)]


def _sizes_of(family: str) -> int:
    plan = parse_strategy(family)
    kind = exchange.TABLE[plan.exchange.name]
    # Where parameters are cut, each of these layers would be a unit that is gathered alone, which no model is made of.
    return 2 if plan.compressor is not None or kind.uses_servers or kind.cuts_parameters else len(SIZES)


@dataclass
class _Side:
    """One contestant: a model under one exchange."""

    context: StepContext
    done: int = 0

    def step(self) -> None:
        view = self.context.exchange.work.next(self.done, 10**6)
        if view is not None:
            self.done = max(self.done + 1, run_step(self.context, view).number)


def _added(world: World, family: str, size: tuple[int, int]) -> Added | None:
    """One row; None where this exchange cannot be run here."""
    layers, width = size
    both, failed = [], ""
    try:
        both = [_side(World.alone(world.device), "ddp", layers, width), _side(world, family, layers, width)]
    except ShoalError as error:
        failed = str(error)
    if any(world.gather_values(failed)):
        return None
    alone, shared = both
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 1):
        for side, seen in zip((alone, shared), times, strict=True):
            world.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                side.step()
            world.barrier()
            if turn:
                seen.append((time.perf_counter() - start) / STEPS)
    profile = _profile(layers, width)
    cost: Cost = plan_cost(check_text(family, world.size), profile, Mesh.imagine(World.alone(), world.size))
    gaps = [b - a for a, b in zip(*times, strict=True)]
    found = world.gather_values([min(gaps), statistics.median(gaps), max(gaps)])[0]
    for side in both:
        side.context.exchange.close()
    del both, alone, shared
    settle()
    sent = cost.wire.get("data", 0.0) + cost.wire.get("server", 0.0)
    return Added(sum(p.nbytes for p in profile.trained), layers, sent, Interval(*found))


def _side(world: World, strategy: str, layers: int, width: int, samples: int = 1) -> _Side:
    data = TensorDataset(torch.ones(2 * world.size * samples, width, device="cpu"))
    config = RunConfig(
        model=lambda: Tower(layers, width),
        loss=squared,
        optimizer=adamw,
        data=data,
        global_batch=world.size * samples,
        strategy=strategy,
    )
    made = build(config, world, "")[1]
    made.exchange.start(0, made.join_state())
    return _Side(made)


def _grows(world: World, family: str) -> int:
    """Bytes by which this process grows when it first works so, beside the states of its model, and beside what it
    grows by alone: code, threads, room for messages. Of the worker that grows the most."""
    grown: list[int] = []
    layers, width = SIZES[1]
    for side_world, strategy in ((World.alone(world.device), "ddp"), (world, family)):
        settle()
        before = resident("VmRSS")
        try:
            side = _side(side_world, strategy, layers, width, samples=2)
        except ShoalError:
            return 0
        for _ in range(2):
            side.step()
        plan = check_text(strategy, side_world.size)
        cells = degree_of(plan.tensor) * degree_of(plan.pipeline)
        whole = _profile(layers, width)
        mesh = Mesh.imagine(World.alone(), side_world.size // cells)
        held = plan_cost(replace(plan, tensor=None, pipeline=None), whole, mesh).total // cells
        grown.append(resident("VmRSS") - before - held)
        side.context.exchange.close()
        del side
    settle()
    everyone: list[int] = world.gather_values(grown[1] - max(0, grown[0]))
    return max(0, *everyone)


def _microbatch(world: World) -> float:
    """Seconds that a pipeline takes for each micro-batch of a model that is nothing: its runtime and its messages."""
    times = {}
    for count in (2, 8):
        schedule = f"ddp * pp{world.size}(gpipe, microbatches={count})"
        side = _side(world, schedule, 2 * world.size, 8, samples=8)
        times[count] = _timed(world, side.step, 2)
        side.context.exchange.close()
    return max(0.0, (times[8] - times[2]) / 6)


def _flops(world: World) -> float:
    """Of one worker, in products of matrices, with all others at work."""
    a = torch.ones(512, 512, device=world.device)
    return 2 * 512**3 / _timed(world, lambda: a @ a, 6)


def _sums(world: World) -> list[tuple[int, float]]:
    """Seconds of an all-reduce by its bytes."""
    found = []
    for exponent in (10, 13, 16, 19, 22):
        tensor = torch.ones(2**exponent // 4, device=world.device)
        found.append((2**exponent, _timed(world, lambda t=tensor: world.all_reduce(t).wait(), 6)))  # type: ignore[misc]
    return found


def _timed(world: World, act: Callable[[], object], times: int) -> float:
    act()
    seen = []
    for _ in range(3):
        world.barrier()
        start = time.perf_counter()
        for _ in range(times):
            act()
        seen.append((time.perf_counter() - start) / times)
    return float(world.gather_values(statistics.median(seen))[0])
