"""`zero3` beside torch's FSDP2 on gloo, in the same processes, alternating; and what it holds at its peak.

    scripts/bench zero3                     2 and 4 workers, 20 M and 60 M parameters
    scripts/bench zero3 --quick             2 workers, 20 M parameters
    scripts/bench zero3 --peers             also DeepSpeed ZeRO-3, if it is installed

Accelerate is no contestant: without cards it takes no notice of its FSDP plugin and runs DDP.

Goals: a step takes at most 0.9 of FSDP2's, with and without gathering again for backward. A worker's peak is at most
1.1 × (states / workers + 4 × largest unit + activations). The peak is the kernel's own mark of resident memory, set
back after the first steps, with memory that workers share counted once; activations are what one worker alone under
solo has beyond its states.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.process_memory import peak_since, resident, settle, warm_up
from benchmarks.workload.transformer import (
    SIZES,
    Case,
    Step,
    adamw,
    count_parameters,
    dataset,
    loss,
    make_fsdp2,
    make_transformer,
    shoal_loop,
    torch_loop,
)
from benchmarks.workload.turns import Ratio, Times, alternate, goals_of_medians, section_of_times
from shoal.blocks import find_blocks
from shoal.testing.spawn import spawn
from shoal.world.world import World

PEERS = {"deepspeed zero-3": "deepspeed"}
GOALS: list[Ratio] = [
    ("zero3", "torch fsdp2", 0.9),
    ("zero3(reshard=false)", "torch fsdp2, kept", 0.9),
    ("zero3", "deepspeed zero-3", 1.0),
]
ROOM = 1.1
STATE_BYTES = 16
"""Of a parameter: value, gradient and two numbers of Adam."""


def fsdp2(world: World, case: Case, reshard: bool) -> Step:
    """What a user of torch writes."""
    model = make_fsdp2(case.size, init_device_mesh("cpu", (world.size,)), reshard)
    return torch_loop(world, case, model, adamw(list(model.parameters())))


def deepspeed(world: World, case: Case) -> Step:
    """The same with DeepSpeed."""
    import deepspeed as ds  # type: ignore[import-not-found]

    model = make_transformer(case.size)
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, optimizer=adamw(list(model.parameters())), config=config)
    data = dataset(4 * case.batch * world.size)

    def step() -> None:
        rows = torch.arange(case.batch) + world.rank * case.batch
        batch = tuple(t[rows] for t in data.tensors)
        total, count = loss(engine(batch[0]), batch)
        engine.backward(total / count)
        engine.step()

    return step


def contest(world: World, case: Case, only: list[str], rounds: int, steps: int) -> Times:
    """Seconds of every timed step. The default group of these processes is gloo, as peers expect it."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank))
    group = dist.new_group(backend="shoal")
    ours = World(world.rank, world.size, world.device, world.hosts, world.store, group)
    everyone: dict[str, Callable[[], Step]] = {
        "torch fsdp2": lambda: fsdp2(world, case, True),
        "torch fsdp2, kept": lambda: fsdp2(world, case, False),
        "zero3": lambda: shoal_loop(ours, case, "zero3"),
        "zero3(reshard=false)": lambda: shoal_loop(ours, case, "zero3(reshard=false)"),
        "zero3, gloo": lambda: shoal_loop(world, case, "zero3"),
        "deepspeed zero-3": lambda: deepspeed(world, case),
    }
    return alternate(world, {name: make for name, make in everyone.items() if name in only}, rounds, steps)


def peak(world: World, case: Case, strategy: str) -> int:
    """The most that a worker held during a step, beyond what it had before the model was made."""
    torch.set_num_threads(1)
    warm_up()
    before = resident("VmRSS") - resident("RssShmem")
    step = shoal_loop(world, case, strategy)
    for _ in range(2):
        step()
    settle()
    most = peak_since(lambda: [step() for _ in range(2)])
    shared = resident("RssShmem")
    return most - before - shared + shared // world.size


def largest_unit(model: torch.nn.Module) -> int:
    """Parameters of the largest block, or of what is in none."""
    blocks = [count_parameters(model.get_submodule(name)) for name in find_blocks(model)]
    return max([*blocks, count_parameters(model) - sum(blocks)])


def memory(sizes: list[str], counts: list[int]) -> Section:
    """The peak beside what must be held."""
    columns = [
        Column("size"),
        Column("workers"),
        Column("states MB", "{:.1f}"),
        Column("4 units MB", "{:.1f}"),
        Column("activations MB", "{:.1f}"),
        Column("peak MB", "{:.1f}"),
        Column("peak / sum", "{:.3f}"),
    ]
    rows: list[Row] = []
    goals = []
    for size in sizes:
        case = Case(size, 1)
        model = make_transformer(size)
        states, units = STATE_BYTES * count_parameters(model), 4 * 4 * largest_unit(model)
        (alone,) = spawn(peak, 1, case, "solo", timeout=600)
        activations = alone - states
        for workers in counts:
            found = max(spawn(peak, workers, case, "zero3", timeout=600))
            ratio = found / (states / workers + units + activations)
            held = (states / workers, units, activations, found)
            rows.append([size, workers, *(nbytes / 1e6 for nbytes in held), ratio])
            goals.append(
                Goal(f"{size}, {workers} workers: peak / (states + 4 units + activations)", ratio, ROOM)
            )
    return Section("memory of a worker at its peak under zero3", columns, rows, goals)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much is compared."""
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", action="store_true", help="DeepSpeed too")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each worker in a step")
    parser.add_argument("--skip", choices=["times", "memory"])


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """Step times for each size and number of workers, then memory."""
    # Large blocks go back to the system when they are freed, or the peak would be the allocator's and not ours.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sizes, counts = (["20M"], [2]) if options.quick else (options.sizes, options.workers)
    chosen = ["torch fsdp2", "torch fsdp2, kept", "zero3", "zero3(reshard=false)", "zero3, gloo"]
    notes = []
    for name, module in PEERS.items() if options.peers else ():
        if importlib.util.find_spec(module) is None:
            notes.append(f"without {name}: the package {module} is not installed here")
        else:
            chosen.append(name)
    for size in sizes if options.skip != "times" else ():
        for workers in counts:
            case = Case(size, options.batch)
            given = (chosen, options.rounds, options.steps)
            times = spawn(contest, workers, case, *given, timeout=3600, backend="gloo")[0]
            title = f"{size}, {workers} workers, batch {case.batch} a worker"
            section = section_of_times(title, times, ["torch fsdp2", "torch fsdp2, kept"])
            yield replace(section, goals=goals_of_medians(times, GOALS), notes=notes)
    if options.skip != "memory":
        yield memory(sizes, counts)
