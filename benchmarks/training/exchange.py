"""Every exchange beside torch DDP and FSDP2, alternating in one run: step time as medians and ratios.

    scripts/bench exchange            2 and 4 workers, 20 M and 60 M parameters (about half an hour on two cores)
    scripts/bench exchange --quick    2 workers, 20 M parameters

All contestants train the same transformer with fused AdamW on the same batches. `compute` is the same loop with
no communication at all: the physical limit of a worker that shares the machine with the others. Goals: GOALS below.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report.result import Section
from benchmarks.workload.transformer import (
    CONTEXT,
    SIZES,
    Case,
    Step,
    adamw,
    compute_loop,
    count_parameters,
    make_fsdp2,
    make_transformer,
    shoal_loop,
    torch_loop,
)
from benchmarks.workload.turns import Ratio, Times, alternate, goals_of_medians, section_of_times
from shoal.testing.spawn import spawn
from shoal.world.world import World

GOALS: list[Ratio] = [
    ("shared", "compute", 1.06),
    ("shared", "torch ddp, gloo", 0.92),
    ("ddp, gloo", "torch ddp, gloo", 1.02),
    ("ddp, shm", "torch ddp, shm", 1.02),
    ("zero1, shm", "ddp, shm", 1.05),
    ("zero2, shm", "ddp, shm", 1.05),
    ("zero1, gloo", "ddp, gloo", 1.05),
    ("zero2, gloo", "ddp, gloo", 1.05),
    ("zero1, shm", "torch fsdp2, gloo", 1.0),
    ("zero2, shm", "torch fsdp2, gloo", 1.0),
    ("zero1, gloo", "torch fsdp2, gloo", 1.0),
    ("zero2, gloo", "torch fsdp2, gloo", 1.0),
]


def contestants(world: World, case: Case) -> dict[str, Callable[[], Step]]:
    """Each by name, and what makes it."""
    group = dist.new_group(backend="gloo")
    name = os.environ.get("SHOAL_HOST", "")
    os.environ["SHOAL_HOST"] = f"apart{world.rank}"  # so counted, no two workers share memory: messages only
    apart = dist.new_group(backend="shoal")
    os.environ["SHOAL_HOST"] = name
    over_gloo = World(world.rank, world.size, world.device, world.hosts, world.store, apart)
    stock_gloo = World(world.rank, world.size, world.device, world.hosts, world.store, group)

    def by_hand(model: nn.Module) -> Step:
        return torch_loop(world, case, model, adamw(list(model.parameters())))

    def ddp(through: dist.ProcessGroup | None) -> Step:
        model = make_transformer(case.size)
        return by_hand(DistributedDataParallel(model, process_group=through, gradient_as_bucket_view=True))

    def fsdp() -> Step:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        return by_hand(make_fsdp2(case.size, mesh, reshard=False))

    return {
        "compute": lambda: compute_loop(world, case),
        "torch ddp, gloo": lambda: ddp(group),
        "torch fsdp2, gloo": fsdp,
        "ddp, gloo": lambda: shoal_loop(stock_gloo, case, "ddp"),
        "zero1, gloo": lambda: shoal_loop(over_gloo, case, "zero1"),
        "zero2, gloo": lambda: shoal_loop(over_gloo, case, "zero2"),
        "torch ddp, shm": lambda: ddp(world.group),
        "ddp, shm": lambda: shoal_loop(world, case, "ddp"),
        "zero1, shm": lambda: shoal_loop(world, case, "zero1"),
        "zero2, shm": lambda: shoal_loop(world, case, "zero2"),
        "shared": lambda: shoal_loop(world, case, "shared"),
    }


def contest(world: World, case: Case, only: list[str], rounds: int, steps: int) -> Times:
    """Seconds of every timed step of every contestant."""
    torch.set_num_threads(1)
    makers = {name: make for name, make in contestants(world, case).items() if not only or name in only}
    return alternate(world, makers, rounds, steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much is compared."""
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each worker in a step")
    parser.add_argument("--only", nargs="*", default=[], help="contestants")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each size and number of workers."""
    sizes, counts = (["20M"], [2]) if options.quick else (options.sizes, options.workers)
    for size in sizes:
        parameters = count_parameters(make_transformer(size))
        for workers in counts:
            case = Case(size, options.batch)
            times = spawn(contest, workers, case, options.only, options.rounds, options.steps, timeout=3600)[
                0
            ]
            what = f"{size} ({parameters / 1e6:.1f} M parameters), {workers} workers"
            title = f"{what}, batch {case.batch}×{CONTEXT} a worker"
            section = section_of_times(title, times, ["compute", "torch ddp, gloo"])
            yield replace(section, goals=goals_of_medians(times, GOALS))
