"""A pipeline beside the formula: how close is a step to what its stages' own times allow?

    scripts/bench pipeline [--schedule 1f1b] [--stages 2] [--microbatches 8] [--rounds 6]

Every worker first times its stage alone, forward and backward of one micro-batch, all workers at once and with
nothing sent. From these times the schedule says how long a step must take, bubble included (pipeline/check_schedule.py
simulates it). The same workers then run real steps; the two alternate. Goal: 1f1b is within 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks.report.result import Column, Goal, Section
from benchmarks.workload.transformer import SIZES, Case
from shoal import pipeline
from shoal.exchange.contract import StepView, Tally
from shoal.pipeline.base import Costs
from shoal.pipeline.check_schedule import simulate
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.pipelined import StageRunner
from shoal.world.world import World

GOAL = 1.10
JUDGED = "1f1b"


@dataclass
class Found:
    """Seconds, by round: of this worker's stages for one micro-batch, and of whole steps."""

    forward: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def time_stage(chunk: StageRunner, received: torch.Tensor, micro: int) -> tuple[float, float]:
    """Seconds of one stage's forward and backward passes over one micro-batch."""
    received = received.detach().requires_grad_(received.is_floating_point())
    begun = time.perf_counter()
    output = chunk(received, micro=micro)
    middle = time.perf_counter()
    output.backward(torch.ones_like(output))
    return middle - begun, time.perf_counter() - middle


def contest(world: World, strategy: str, size: str, batch: int, rounds: int) -> Found:
    """Stages alone and whole steps, in turns."""
    torch.set_num_threads(1)
    config = replace(Case(size, batch).config(World.alone(), strategy), global_batch=batch)
    context = build(config, world, record="")[1]
    line = context.pipeline
    assert line is not None
    found = Found()
    for turn in range(rounds + 1):
        portion = context.loader.take(turn)
        forward, backward = [], []
        for number, chunk in line._chunks.items():
            line._job.loads = [line._job.load(b, True, turn, 0) for b in portion.batches]
            example = line._example(number - 1)
            received = torch.zeros(example.shape, dtype=example.dtype)
            world.barrier()
            pairs = [time_stage(chunk, received, i) for i in range(len(portion.batches))]
            forward.append(statistics.median(f for f, _ in pairs))
            backward.append(statistics.median(b for _, b in pairs))
        for p in context.model.parameters():
            p.grad = None
        context.exchange.begin(StepView(turn))
        world.barrier()
        begun = time.perf_counter()
        line.run(turn, portion, 1.0)
        world.barrier()
        taken = time.perf_counter() - begun
        context.exchange.finish(Tally(0.0, 1.0))
        context.exchange.discard()
        if turn:  # the first round warms up
            found.forward.append(forward)
            found.backward.append(backward)
            found.steps.append(taken)
    return found


def compare(name: str, options: argparse.Namespace) -> list[float | str | None]:
    """One schedule: its row."""
    strategy = f"ddp * pp{options.stages}({name}, microbatches={options.microbatches})"
    answers = spawn(
        contest, options.stages, strategy, options.size, options.batch, options.rounds, timeout=1800
    )
    schedule = pipeline.TABLE.look_up(name)
    costs = []
    for stage in range(options.stages * schedule.stages_per_rank):
        owner = answers[schedule.rank_of(stage, options.stages)]
        slot = stage // options.stages
        forward = statistics.median(row[slot] for row in owner.forward)
        backward = statistics.median(row[slot] for row in owner.backward)
        costs.append(Costs(forward, backward / 2, backward / 2))
    expected = simulate(schedule, options.stages, options.microbatches, costs)
    taken = statistics.median(answers[0].steps)
    shown = "  ".join(f"{c.forward * 1e3:.0f}+{c.backward * 1e3:.0f}" for c in costs)
    return [name, shown, expected.makespan * 1e3, taken * 1e3, taken / expected.makespan, expected.idle]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and how it is cut."""
    parser.add_argument("--schedule", nargs="*", default=["1f1b", "gpipe", "zerobubble", "interleaved"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", default="20M", choices=list(SIZES))


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a schedule."""
    columns = [
        Column("schedule"),
        Column("stages' times, forward+backward ms"),
        Column("formula ms", "{:.1f}"),
        Column("step ms", "{:.1f}"),
        Column("step / formula", "{:.3f}"),
        Column("idle by formula", "{:.1%}"),
    ]
    rows = [compare(name, options) for name in options.schedule]
    goals = [
        Goal(f"{JUDGED}: step / formula", float(row[4] or 0.0), GOAL) for row in rows if row[0] == JUDGED
    ]
    what = f"{options.size} parameters, {options.stages} workers"
    title = f"{what}, {options.batch} sequences in {options.microbatches} micro-batches"
    yield Section(title, columns, rows, goals)
