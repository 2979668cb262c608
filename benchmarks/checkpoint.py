"""Saving and loading beside torch DCP, in the same processes, alternating; what a checkpoint costs the training.

    scripts/bench checkpoint              2 workers, 20 M and 60 M parameters with AdamW
    scripts/bench checkpoint --workers 4

Everybody's state is cut into equal parts over the workers: zero3 here, FSDP2 there. Goals: the training stops for at
most 1.2 × a copy of what a worker holds, and at most 0.5 × as long as DCP's async_save; saving and loading are as fast
as DCP's; a checkpoint every 10 steps costs at most 2 %; verifying runs at 1.5 GB/s a core; 200 MB come back from
another host's memory in 2 s. Loading here includes checking every byte, which DCP does not do.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exchange import SIZES, Case, Transformer, adamw, count_missed, make_parts
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.checkpoint.find import Local, find_whole
from shoal.checkpoint.folder import look
from shoal.checkpoint.load import Reader
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.plan import Holding
from shoal.checkpoint.region import Region
from shoal.checkpoint.save import Facts, Saver
from shoal.checkpoint.verify import verify
from shoal.testing.spawn import spawn
from shoal.train.checkpoints import Checkpoints, Wishes
from shoal.train.parts import Parts
from shoal.train.progress import Progress
from shoal.train.state import collect
from shoal.train.step import run_step
from shoal.world.world import World

Times = dict[str, list[float]]
T = TypeVar("T")


def make(world: World, strategy: str, size: str) -> Parts:
    parts = make_parts(world, Case(size, 8, 0, 0, ()), strategy)
    for number in range(2):
        run_step(parts, number)
    return parts


def clocked(world: World, action: Callable[..., T], *given: object) -> tuple[float, T]:
    """Seconds until the slowest worker is done, and what came of it."""
    gc.collect()
    world.barrier()
    start = time.perf_counter()
    result = action(*given)
    mine = time.perf_counter() - start
    return float(world.gather_numbers([mine]).max()), result


def saving(world: World, root: str, size: str, rounds: int) -> Times:
    """Blocking and total time of saves, time of loads; beside DCP, and beside one copy in memory."""
    torch.set_num_threads(1)
    shm = dist.new_group(backend="shoal")  # as a run has it; DCP saves asynchronously over gloo only
    here = World(world.rank, world.size, world.device, world.hosts, world.store, shm)
    parts = make(here, "zero3", size)
    checkpoints = Checkpoints(parts, "zero3", Wishes(Path(root) / "ours"))
    peer, peers_optimizer = fsdp2(world, size)
    held = [tensor for _, tensor in collect(parts.whole, {})]
    room = [torch.empty_like(tensor) for tensor in held]
    times: Times = {}

    def note(name: str, action: Callable[..., T], *given: object) -> T:
        seconds, result = clocked(world, action, *given)
        times.setdefault(name, []).append(seconds)
        return result

    theirs = Path(root) / "theirs"
    progress = Progress(2)
    for turn in range(rounds + 1):
        if turn == 1:
            times.clear()  # the first of each takes memory for the first time
        note("copy", torch._foreach_copy_, room, held)
        note("ours, blocking", checkpoints.begin, f"step-{turn}", progress)
        checkpoints.wait()
        world.barrier()
        state = dict(zip(("model", "optimizer"), get_state_dict(peer, peers_optimizer), strict=True))
        pending = note("dcp, blocking", partial(dcp.async_save, state, checkpoint_id=theirs / f"a{turn}"))
        pending.result()
        note("ours, save", checkpoints.save, f"whole-{turn}", progress)
        note("dcp, save", partial(dcp.save, state, checkpoint_id=theirs / f"s{turn}"))
        forget(world, Path(root))
        note("ours, load", checkpoints.resume)
        note("dcp, load", partial(dcp.load, state, checkpoint_id=theirs / f"s{turn}"))
        if world.rank == 0:
            for folder in (
                theirs / f"a{turn}",
                theirs / f"s{turn}",
                Path(root) / "ours" / f"whole-{turn - 1}",
            ):
                shutil.rmtree(folder, ignore_errors=True)
        world.barrier()
    times["bytes a worker"] = [float(sum(tensor.numel() * tensor.itemsize for tensor in held))]
    return times


def forget(world: World, root: Path) -> None:
    """Let no file be in the page cache: a run goes on after a crash, and DCP's files would be there and ours not."""
    for file in root.rglob("*") if world.rank == 0 else ():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def fsdp2(world: World, size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """As its documentation shows it."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = Transformer(*SIZES[size])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(list(model.parameters()))
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def training(world: World, root: str, rounds: int) -> Times:
    """Seconds of ten steps, with a checkpoint among them and without."""
    torch.set_num_threads(1)
    parts = make(world, "shared", "20M")
    checkpoints = Checkpoints(parts, "shared", Wishes(Path(root) / "train"))
    times: Times = {"ten steps": [], "ten steps and a checkpoint": []}
    number = 2

    def ten(saves: bool) -> None:
        """What is begun first is written while the steps run: they pay for all of it."""
        nonlocal number
        if saves:
            checkpoints.begin(f"step-{number}", Progress(number))
        for _ in range(10):
            run_step(parts, number)
            number += 1

    for turn in range(rounds + 1):
        for saves in (False, True) if turn % 2 else (True, False):
            seconds, _ = clocked(world, ten, saves)
            checkpoints.wait()
            if turn:
                name = "ten steps and a checkpoint" if saves else "ten steps"
                times[name].append(seconds)
    return times


def from_memory(world: World, root: str, rounds: int) -> Times:
    """Seconds to get 200 MB back when one of two hosts has lost its memory and the disk is gone."""
    times: Times = {"200 MB from another host's memory": []}
    half = 25_000_000
    whole = Region.whole((2 * half,))
    mine = torch.full((half,), float(world.rank))
    memory = Path(tempfile.gettempdir()) if not Path("/dev/shm").is_dir() else Path("/dev/shm")
    for turn in range(rounds):
        disk = Path(root) / f"lost-{turn}"
        peers = Peers(world, disk, memory)
        saver = Saver(world, disk, peers=peers)
        region = whole.within(half * world.rank, half * (world.rank + 1))
        saver.save([(Holding("parameter/w", region, mine.dtype), mine)], Facts("step-1", 1, "test", {}))
        saver.wait()
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(disk)
        else:
            peers.close()
        out = torch.empty(half)

        def back(disk: Path = disk, out: torch.Tensor = out) -> None:
            again = Peers(world, disk, memory)
            found = find_whole(world, [Local(world, disk), again])
            assert found is not None
            Reader.of(found).read_into(
                "parameter/w", whole.within(half * world.rank, half * (world.rank + 1)), out
            )

        times["200 MB from another host's memory"].append(clocked(world, back)[0])
        assert torch.equal(out, mine)
        world.barrier()
        Peers(world, disk, memory).close()
        world.barrier()
    return times


def verifying(root: Path) -> float:
    """GB/s of one core."""
    speeds = []
    found = look(root)[0]
    assert found.manifest is not None
    for _ in range(5):
        start = time.perf_counter()
        assert list(verify(found)) == []
        speeds.append(found.manifest.nbytes / 1e9 / (time.perf_counter() - start))
    return statistics.median(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder if not given")
    args = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        for size in ("20M", "60M"):
            folder = f"{root}/{size}"
            times = spawn(saving, args.workers, folder, size, args.rounds, timeout=900, backend="gloo")[0]
            held = times.pop("bytes a worker")[0]
            print(f"\n{size} parameters, {args.workers} workers, {held / 1e6:.0f} MB each")
            medians = show(times)
            missed += count_missed(
                [
                    ("blocking / copy", medians["ours, blocking"] / medians["copy"], 1.2),
                    ("blocking / dcp", medians["ours, blocking"] / medians["dcp, blocking"], 0.5),
                    ("save / dcp", medians["ours, save"] / medians["dcp, save"], 1.0),
                    ("load / dcp", medians["ours, load"] / medians["dcp, load"], 1.0),
                ]
            )
            print(f"       one copy / dcp, blocking = {medians['copy'] / medians['dcp, blocking']:.3f}")
        speed = verifying(Path(root) / "60M" / "ours")
        print(f"\nverify: {speed:.1f} GB/s on one core")
        medians = show(spawn(training, args.workers, root, args.rounds, timeout=1800)[0])
        medians |= show(spawn(from_memory, 2, root, 3, hosts=["left", "right"], timeout=300)[0])
    missed += count_missed(
        [
            (
                "a checkpoint every ten steps",
                medians["ten steps and a checkpoint"] / medians["ten steps"],
                1.02,
            ),
            ("seconds from memory", medians["200 MB from another host's memory"], 2.0),
            ("1.5 GB/s / verify", 1.5 / speed, 1.0),
        ]
    )
    sys.exit(missed > 0)


def show(times: Times) -> dict[str, float]:
    """Print and return medians."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    for name, median in medians.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        print(f"{name:<36} {median * 1e3:9.1f} ms   {low * 1e3:.1f}..{high * 1e3:.1f}")
    return medians


if __name__ == "__main__":
    main()
