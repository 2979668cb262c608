"""How much memory the states of a model take under each exchange, beside what Shoal says before anything runs.

    scripts/bench memory

Each worker's share of private and shared pages (PSS) is read from the kernel after some steps with a tiny batch,
and what it had before the model was made is taken off. The activations and temporaries of one worker, measured
alone under solo, are taken off as well, so what is left is parameters, gradients and optimizer state. Goal: at most
1.1 times what Shoal says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.process_memory import proportional, settle, warm_up
from benchmarks.workload.transformer import SIZES, Case, count_parameters, make_transformer, shoal_loop
from shoal.testing.spawn import spawn
from shoal.train.profile_run import cost_of
from shoal.world.world import World

GOAL = 1.1
STRATEGIES = ("ddp", "zero1", "zero2", "shared")


def held(world: World, case: Case, strategy: str) -> int:
    """What a worker gained by having the model and training it."""
    torch.set_num_threads(1)
    warm_up()
    world.barrier()
    before = proportional()
    world.barrier()
    step = shoal_loop(world, case, strategy)
    for _ in range(3):
        step()
    settle()
    world.barrier()
    after = proportional()
    world.barrier()  # nobody leaves, and unmaps, while another still counts
    return after - before


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much is measured."""
    parser.add_argument("--quick", action="store_true", help="20 M parameters, 2 workers")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each size."""
    sizes, counts = (["20M"], [2]) if options.quick else (options.sizes, options.workers)
    columns = [
        Column("exchange"),
        Column("workers"),
        Column("said MB", "{:.1f}"),
        Column("measured MB", "{:.1f}"),
        Column("extra MB", "{:.1f}"),
        Column("(measured - extra) / said", "{:.3f}"),
    ]
    note = "extra: activations, temporaries and allocator slack of one worker, measured alone under solo"
    for size in sizes:
        case, rows, goals = Case(size, 1), list[Row](), list[Goal]()
        (alone,) = spawn(held, 1, case, "solo", timeout=600)
        # At rest, solo holds parameters and two numbers of Adam; no gradient.
        extra = alone - 3 * 4 * count_parameters(make_transformer(size))
        for workers in counts:
            for name in STRATEGIES:
                found = spawn(held, workers, case, name, timeout=600)
                mean = sum(found) / workers
                config = replace(case.config(World.alone(), name), global_batch=workers)
                said = cost_of(config, workers).total
                ratio = (mean - extra) / said
                rows.append([name, workers, said / 1e6, mean / 1e6, extra / 1e6, ratio])
                goals.append(Goal(f"{name}, {workers} workers: measured / said", ratio, GOAL))
        yield Section(f"memory of a worker, {size} parameters", columns, rows, goals, [note])
