"""Predictions beside what is measured: published runs, steps and memory of real workers, and speed of planning.

    scripts/bench plan            6 models, every exchange and division, 2 and 4 workers (half an hour, two idle cores)
    scripts/bench plan --quick    2 models, 2 workers

For each model and number of workers the machine is calibrated, the model profiled, every plan predicted, and then run
for real, in turns with the others. Goals: GOALS below. On a machine with other work on it, the times say nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.plan.models import MODELS, config_of
from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.process_memory import resident
from benchmarks.workload.steps import make_stepper
from benchmarks.workload.transformer import Case
from shoal.plan.machine import Machine
from shoal.plan.paper.published import rank_agreement, read_published
from shoal.plan.paper.replay import replay
from shoal.plan.predict import Prediction, Predictor, Setting
from shoal.plan.search import Wanted, search
from shoal.plan.show import best_of_each
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.planning.calibrate import calibrate
from shoal.train.planning.profile_work import Effort, profile_work
from shoal.train.planning.rehearsal import settle, unheard
from shoal.train.planning.trace import trace
from shoal.world.world import World

PUBLISHED = Path(__file__).with_name("published.json")
TIME_MEAN, TIME_WORST, ORDER, REGRET = 0.05, 0.15, 0.9, 0.03
MEMORY_MEAN, MEMORY_WORST = 0.05, 0.10
PLAIN = ("ddp", "zero1", "zero2", "zero3")
PAPER_MEAN, PLANS_A_SECOND, LARGE_SECONDS = 0.10, 1000.0, 10.0


@dataclass(frozen=True)
class Tried:
    """One plan of one model."""

    model: str
    workers: int
    strategy: str
    predicted: float
    measured: float
    low: float
    high: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much is compared."""
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=["paper", "speed", "time", "memory"])


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each part."""
    names, counts = (["mlp", "transformer"], [2]) if options.quick else (options.models, options.workers)
    if "paper" in options.parts:
        yield paper()
    if "speed" in options.parts:
        yield speed()
    if "time" in options.parts:
        tried: list[Tried] = []
        for workers in counts:
            tried += spawn(contest, workers, names, options.rounds, timeout=3600)[0]
        yield times(tried)
    if "memory" in options.parts:
        yield memory(names, counts)


def paper() -> Section:
    """Published runs after one calibration for each kind of hardware."""
    found = replay(read_published(PUBLISHED))
    columns = [Column("hardware, group"), Column("runs")]
    columns += [Column(name, "{:.3f}") for name in ("mean error", "worst", "held-out halves", "order (tau)")]
    rows: list[Row] = [
        [one.hardware, len(one.runs), one.mean, max(one.errors), one.held_out, one.order] for one in found
    ]
    errors = [error for one in found for error in one.errors]
    goals = [Goal("mean error of all", statistics.mean(errors), PAPER_MEAN)]
    goals += [Goal(f"mean error, {one.hardware}", one.mean, PAPER_MEAN) for one in found]
    return Section("published runs, predicted", columns, rows, goals, part="paper")


class Large(nn.Module):
    """The shapes of a model of 7 B parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 4096)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4096, 32, 16384, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(32)
        )
        self.head = nn.Linear(4096, 32000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def speed() -> Section:
    """Plans a second, and the profile of a model of 7 B parameters that nobody holds."""
    torch.set_num_threads(1)
    with unheard():
        work = profile_work(config_of("transformer"), World.alone(), 2, Machine(1, 2), Effort(seconds=1.0))
        predictor = Predictor(work, Machine(2, 2), Setting(2, 64), {})
        search(predictor, Wanted())
        start = time.process_time()
        predictor = Predictor(work, Machine(2, 2), Setting(2, 64), {})
        found = search(predictor, Wanted())
        rate = len(found.plans) / (time.process_time() - start)
        data = torch.utils.data.TensorDataset(*(torch.zeros(2, 2048, dtype=torch.long),) * 2)
        case = replace(Case("20M", 1).config(World.alone(), "ddp"), model=Large, data=data, global_batch=1)
        before, start = resident("VmHWM"), time.process_time()
        traced = trace(case, 1)
        seconds = time.process_time() - start
        grown = (resident("VmHWM") - before) / 1e9
    rows: list[Row] = [
        ["plans a second, after profiling", rate],
        ["seconds to profile 7 B parameters", seconds],
        ["GB that it took", grown],
        ["TFLOP of its pass", traced.flops / 1e12],
    ]
    goals = [
        Goal("plans a second", rate, PLANS_A_SECOND, least=True),
        Goal("seconds to profile 7 B parameters", seconds, LARGE_SECONDS),
        Goal("GB that it took", grown, 1.0),
    ]
    note = "seconds of one core's work"
    return Section(
        "speed of planning", [Column("what"), Column("found", "{:.2f}")], rows, goals, [note], part="speed"
    )


def contest(world: World, names: list[str], rounds: int) -> list[Tried]:
    """Predict and run every plan of these models, in turns."""
    torch.set_num_threads(1)
    machine = calibrate(world, servers=False)
    found: list[Tried] = []
    for name in names:
        config = config_of(name)
        with unheard():
            work = profile_work(config, world, world.size, machine, Effort(seconds=3.0))
        chosen: list[tuple[str, float, float, float]] = []
        if world.rank == 0:
            predictor = Predictor(work, machine, Setting(world.size, config.global_batch), {})
            plans = best_of_each(search(predictor, Wanted()).plans)
            chosen = [_told(one) for one in plans if _can_be_run(one)]
        chosen = [tuple(one) for one in world.gather_values(chosen)[0]]
        seen: dict[str, list[float]] = {one[0]: [] for one in chosen}
        for turn in range(rounds):
            for strategy in list(seen) if turn % 2 == 0 else list(reversed(seen)):
                seen[strategy].append(_steps(world, name, strategy))
        for strategy, middle, low, high in chosen:
            measured = statistics.median(seen[strategy])
            found.append(Tried(name, world.size, strategy, middle, measured, low, high))
    return found


def _told(one: Prediction) -> tuple[str, float, float, float]:
    return str(one.plan), one.seconds.middle, one.seconds.low, one.seconds.high


def _can_be_run(one: Prediction) -> bool:
    """Servers and rounds of many steps are for other benchmarks."""
    return one.measured and one.plan.exchange.name in (*PLAIN, "shared")


def _steps(world: World, name: str, strategy: str, count: int = 6) -> float:
    """The median step, as the slowest worker sees it."""
    context = build(config_of(name, strategy), world, "")[1]
    context.exchange.start(0, context.join_state())
    step = make_stepper(context)
    seen = []
    for number in range(2 + count):
        world.barrier()
        start = time.perf_counter()
        step()
        world.barrier()
        if number >= 2:
            seen.append(time.perf_counter() - start)
    context.exchange.close()
    del step, context
    settle()
    return statistics.median(seen)


def times(tried: list[Tried]) -> Section:
    """Errors, order and regret."""
    columns = [Column("model"), Column("workers"), Column("strategy")]
    columns += [Column("predicted ms", "{:.1f}"), Column("measured ms", "{:.1f}"), Column("error", "{:+.3f}")]
    rows: list[Row] = [
        [t.model, t.workers, t.strategy, t.predicted * 1e3, t.measured * 1e3, t.predicted / t.measured - 1]
        for t in tried
    ]
    errors = [abs(t.predicted / t.measured - 1) for t in tried]
    orders, regrets = [], []
    for model, workers in dict.fromkeys((t.model, t.workers) for t in tried):
        group = [t for t in tried if (t.model, t.workers) == (model, workers)]
        orders.append(rank_agreement([t.measured for t in group], [t.predicted for t in group]))
        chosen = min(group, key=lambda t: t.predicted)
        regrets.append(chosen.measured / min(t.measured for t in group) - 1)
    inside = sum(t.low <= t.measured <= t.high for t in tried) / len(tried)
    goals = [
        Goal("mean error", statistics.mean(errors), TIME_MEAN),
        Goal("worst error", max(errors), TIME_WORST),
        Goal("order (tau), mean", statistics.mean(orders), ORDER, least=True),
        Goal("regret of the first, mean", statistics.mean(regrets), REGRET),
    ]
    note = f"{inside:.0%} of the measured are inside of their interval; load {os.getloadavg()[0]:.1f}"
    return Section("a step, predicted and measured", columns, rows, goals, [note], part="time")


def tables(world: World) -> Machine:
    """Of this machine."""
    torch.set_num_threads(1)
    return calibrate(world, servers=False)


def foresee(world: World, name: str, machine: Machine, strategies: list[str]) -> dict[str, tuple[int, int]]:
    """Bytes predicted for each, and at most."""
    torch.set_num_threads(1)
    with unheard():
        work = profile_work(config_of(name), world, world.size, machine, Effort(seconds=1.0))
    predictor = Predictor(work, machine, Setting(world.size, MODELS[name][2]), {})
    found = search(predictor, Wanted(only=strategies))
    return {str(one.plan): (one.total, one.most) for one in found.plans}


def held(world: World, name: str, strategy: str) -> int:
    """Bytes at the peak of a worker that trains."""
    torch.set_num_threads(1)
    context = build(config_of(name, strategy), world, "")[1]
    context.exchange.start(0, context.join_state())
    step = make_stepper(context)
    for _ in range(5):
        step()
    return resident("VmHWM")


def memory(names: list[str], counts: list[int]) -> Section:
    """Peaks, and whether anything said to fit would not have."""
    columns = [Column("model"), Column("workers"), Column("strategy")]
    columns += [Column("predicted MB", "{:.1f}"), Column("measured MB", "{:.1f}"), Column("error", "{:+.3f}")]
    rows: list[Row] = []
    errors, burst = [], 0
    for workers in counts:
        machine = spawn(tables, workers, timeout=300)[0]
        for name in names:
            strategies = [*PLAIN, "ddp + int8", "ddp * tp2", "ddp * pp2(1f1b, microbatches=2)"]
            said = spawn(foresee, workers, name, machine, strategies, timeout=600)[0]
            for strategy, (wanted, most) in said.items():
                found = max(spawn(held, workers, name, strategy, timeout=300))
                error = wanted / found - 1
                rows.append([name, workers, strategy, wanted / 1e6, found / 1e6, error])
                errors.append(abs(error))
                burst += found > most / 0.95  # with the 5 % that a plan leaves free
    goals = [
        Goal("mean error", statistics.mean(errors), MEMORY_MEAN),
        Goal("worst error", max(errors), MEMORY_WORST),
        Goal("said to fit, and would not", float(burst), 0.0),
    ]
    return Section("memory of a worker at its peak", columns, rows, goals, part="memory")
