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
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from exchange import (
    SIZES,
    Case,
    Stepper,
    Transformer,
    adamw,
    alternate,
    dataset,
    judge,
    loss,
    shoal_loop,
    torch_loop,
)
from memory import settle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.blocks import find_blocks
from shoal.exchange.zero3 import Zero3
from shoal.testing.spawn import spawn
from shoal.world.world import World

PEERS = {"deepspeed zero-3": "deepspeed"}
GOALS = [
    ("zero3", "torch fsdp2", 0.9),
    ("zero3(reshard=false)", "torch fsdp2, kept", 0.9),
    ("zero3", "deepspeed zero-3", 1.0),
]
ROOM = 1.1


def fsdp2(world: World, case: Case, reshard: bool) -> Stepper:
    """As its documentation shows it: every block a unit, then the rest."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = Transformer(*SIZES[case.size])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return torch_loop(world, case, model, adamw(list(model.parameters())))


def deepspeed(world: World, case: Case) -> Stepper:
    import deepspeed as ds

    model = Transformer(*SIZES[case.size])
    config = {"train_micro_batch_size_per_gpu": case.batch, "zero_optimization": {"stage": 3}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = ds.initialize(model=model, optimizer=adamw(list(model.parameters())), config=config)
    data = dataset(world, case)

    def step(_: int) -> None:
        rows = torch.arange(case.batch) + world.rank * case.batch
        batch = tuple(t[rows] for t in data.tensors)
        total, count = loss(engine(batch[0]), batch)
        engine.backward(total / count)
        engine.step()

    return step


def contestants(world: World, case: Case) -> dict[str, Callable[[], Stepper]]:
    """The default group of these processes is gloo, as peers expect it; ours has a group of its own."""
    group = dist.new_group(backend="shoal")
    ours = World(world.rank, world.size, world.device, world.hosts, world.store, group)
    everyone: dict[str, Callable[[], Stepper]] = {
        "torch fsdp2": lambda: fsdp2(world, case, True),
        "torch fsdp2, kept": lambda: fsdp2(world, case, False),
        "zero3": lambda: shoal_loop(ours, case, "zero3"),
        "zero3(reshard=false)": lambda: shoal_loop(ours, case, "zero3(reshard=false)"),
        "zero3, gloo": lambda: shoal_loop(world, case, "zero3"),
        "deepspeed zero-3": lambda: deepspeed(world, case),
    }
    return {name: make for name, make in everyone.items() if name in case.only}


def contest(world: World, case: Case) -> dict[str, list[float]]:
    """Seconds of every timed step of every contestant."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank))
    return alternate(world, contestants(world, case), case.rounds, case.steps)


def report(case: Case, workers: int, times: dict[str, list[float]]) -> int:
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(f"\n{case.size}, {workers} workers, batch {case.batch} a worker")
    for name, median in medians.items():
        print(f"{name:<22} {median * 1e3:>10.1f} ms a step")
    return judge(medians, GOALS)


def resident(what: str) -> int:
    """Bytes of this process: now (VmRSS), those of them that are shared (RssShmem), at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not say {what}")


def peak(world: World, size: str, strategy: str) -> int:
    """The most that a worker held during a step, beyond what it had before the model was made."""
    torch.set_num_threads(1)
    warm = torch.nn.Linear(8, 8)
    warm(torch.randn(2, 8)).sum().backward()
    settle()
    before = resident("VmRSS") - resident("RssShmem")
    step = shoal_loop(world, Case(size, 1, 1, 1, ()), strategy)
    for number in range(2):
        step(number)
    settle()
    Path("/proc/self/clear_refs").write_text("5")
    for number in range(2, 4):
        step(number)
    shared = resident("RssShmem")
    return resident("VmHWM") - before - shared + shared // world.size


def largest_unit(model: torch.nn.Module) -> int:
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return max([*sizes, sum(p.numel() for p in model.parameters()) - sum(sizes)])


def measure_memory(sizes: list[str], counts: list[int]) -> int:
    missed = 0
    print("\nsize   workers  states/d MB  4 units MB  activations MB  peak MB  ratio")
    for size in sizes:
        model = Transformer(*SIZES[size])
        parameters, unit = sum(p.numel() for p in model.parameters()), largest_unit(model)
        del model
        (alone,) = spawn(peak, 1, size, "solo", timeout=600)
        extra = alone - Zero3.memory(parameters, 1).total
        for workers in counts:
            found = spawn(peak, workers, size, "zero3", timeout=600)
            formula = Zero3.memory(parameters, workers, largest_unit=unit)
            ratio = max(found) / (formula.total + extra)
            missed += ratio > ROOM
            states = formula.total - formula.buffers
            row = f"{size:<6} {workers:>7} {states / 1e6:>12.1f} {formula.buffers / 1e6:>11.1f} {extra / 1e6:>15.1f}"
            mark = "" if ratio <= ROOM else f"  MISS (goal {ROOM})"
            print(f"{row} {max(found) / 1e6:>8.1f} {ratio:>6.3f}{mark}", flush=True)
    return missed


def main() -> None:
    # Large blocks go back to the system when they are freed, or the peak would be the allocator's and not ours.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--skip", choices=["times", "memory"])
    args = parser.parse_args()
    sizes, counts = (["20M"], [2]) if args.quick else (args.sizes, args.workers)
    chosen = ["torch fsdp2", "torch fsdp2, kept", "zero3", "zero3(reshard=false)", "zero3, gloo"]
    for name, module in PEERS.items() if args.peers else ():
        if importlib.util.find_spec(module) is None:
            print(f"without {name}: the package {module} is not installed here")
        else:
            chosen.append(name)
    missed = 0
    for size in sizes if args.skip != "times" else ():
        for workers in counts:
            case = Case(size, args.batch, args.rounds, args.steps, tuple(chosen))
            missed += report(case, workers, spawn(contest, workers, case, timeout=3600, backend="gloo")[0])
    if args.skip != "memory":
        missed += measure_memory(sizes, counts)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
