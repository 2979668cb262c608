"""Saving and loading beside torch DCP, in the same processes, alternating; what a checkpoint costs the training.

    scripts/bench checkpoint              2 workers, 20 M and 60 M parameters with AdamW
    scripts/bench checkpoint --workers 4

Everybody's state is cut into equal parts over the workers: zero3 here, FSDP2 there. Goals: the training stops for at
most 1.2 × a copy of what a worker holds, and at most 0.5 × as long as DCP's async_save; saving and loading are as fast
as DCP's; a checkpoint every 10 steps costs at most 2 %; verifying runs at 1.5 GB/s a core; 200 MB come back from
another host's memory in 2 s; four times as many parameter tensors take at most five times as long. Loading here
includes checking every byte, which DCP does not do.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from benchmarks.report.result import Goal, Section
from benchmarks.workload.steps import Steps
from benchmarks.workload.transformer import Case, adamw, make_fsdp2, shoal_context
from benchmarks.workload.turns import Times, section_of_times
from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.folder import look
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.write_plan import Holding
from shoal.checkpoint.load import Reader
from shoal.checkpoint.reports import Facts
from shoal.checkpoint.save import Saver
from shoal.checkpoint.verify import verify
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.state.run_state import collect
from shoal.train.step_context import StepContext
from shoal.world.world import World

T = TypeVar("T")

SIZES = ("20M", "60M")
GOALS = [
    ("ours, blocking", "copy", 1.2),
    ("ours, blocking", "dcp, blocking", 0.5),
    ("ours, save", "dcp, save", 1.0),
    ("ours, load", "dcp, load", 1.0),
]
TEN, SAVING = "ten steps", "ten steps and a checkpoint"
MANY = (1250, 5000)
"""Parameter tensors."""
MEMORY = "200 MB from another host's memory"


def make(world: World, strategy: str, size: str) -> tuple[StepContext, Steps]:
    """A run that has trained for two steps."""
    context = shoal_context(world, Case(size, 8), strategy)
    steps = Steps(context)
    for _ in range(2):
        steps.next()
    return context, steps


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
    context, _ = make(here, "zero3", size)
    checkpoints = Checkpoints(context, "zero3", CheckpointConfig(Path(root) / "ours"))
    peer, peers_optimizer = fsdp2(world, size)
    held = [tensor for _, tensor in collect(context.whole, {})]
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
        pending = note("dcp, blocking", partial(async_save, state, checkpoint_id=theirs / f"a{turn}"))
        assert isinstance(pending, Future)
        pending.result()
        note("ours, save", checkpoints.save, f"whole-{turn}", progress)
        note("dcp, save", partial(save, state, checkpoint_id=theirs / f"s{turn}"))
        forget(world, Path(root))
        note("ours, load", checkpoints.resume)
        note("dcp, load", partial(load, state, checkpoint_id=theirs / f"s{turn}"))
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
    """With its optimizer's state."""
    model = make_fsdp2(size, init_device_mesh("cpu", (world.size,)), reshard=True)
    optimizer = adamw(list(model.parameters()))
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def training(world: World, root: str, rounds: int) -> Times:
    """Seconds of ten steps, with a checkpoint among them and without."""
    torch.set_num_threads(1)
    context, steps = make(world, "shared", "20M")
    checkpoints = Checkpoints(context, "shared", CheckpointConfig(Path(root) / "train"))
    times: Times = {TEN: [], SAVING: []}

    def ten(saves: bool) -> None:
        """What is begun first is written while the steps run: they pay for all of it."""
        if saves:
            checkpoints.begin(f"step-{steps.done}", Progress(steps.done))
        for _ in range(10):
            steps.next()

    for turn in range(rounds + 1):
        for saves in (False, True) if turn % 2 else (True, False):
            seconds, _ = clocked(world, ten, saves)
            checkpoints.wait()
            if turn:
                times[SAVING if saves else TEN].append(seconds)
    return times


def from_memory(world: World, root: str, rounds: int) -> Times:
    """Seconds to get 200 MB back when one of two hosts has lost its memory and the disk is gone."""
    times: Times = {MEMORY: []}
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
            found = find_whole(world, [LocalFolder(world, disk), again])
            assert found is not None
            Reader.of(found).read_into(
                "parameter/w", whole.within(half * world.rank, half * (world.rank + 1)), out
            )

        times[MEMORY].append(clocked(world, back)[0])
        assert torch.equal(out, mine)
        world.barrier()
        Peers(world, disk, memory).close()
        world.barrier()
    return times


class Many(nn.Module):
    """A model of so many small parameters."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * weight).sum(1) for weight in self.weights]).mean(0)


def many_tensors(world: World, root: str, tensors: int, rounds: int) -> Times:
    """Seconds of the first save, of later ones, and of steps, where a model has that many parameters."""
    torch.set_num_threads(1)
    data = TensorDataset(torch.ones(64, 16), torch.ones(64))
    config = RunConfig(
        model=partial(Many, tensors),
        loss=squared_error,
        optimizer=adamw,
        data=data,  # type: ignore[arg-type]
        global_batch=8,
        strategy="ddp",
    )
    _, context = build(config, world, record="")
    checkpoints = Checkpoints(context, "ddp", CheckpointConfig(Path(root) / str(tensors)))
    steps = Steps(context)
    times: Times = {"step": [], "later save, blocking": [], "later save": []}
    for _ in range(3):
        steps.next()
    times["first save, blocking"] = [clocked(world, checkpoints.begin, "first", Progress(3))[0]]
    times["first save, on disk"] = [clocked(world, checkpoints.wait)[0]]
    for turn in range(rounds):
        times["step"].append(clocked(world, steps.next)[0])
        times["later save, blocking"].append(clocked(world, checkpoints.begin, f"t-{turn}", Progress(3))[0])
        checkpoints.wait()
        times["later save"].append(clocked(world, checkpoints.save, f"s-{turn}", Progress(3))[0])
    times["resume"] = [clocked(world, checkpoints.resume)[0]]
    return times


def squared_error(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    """Summed over the samples."""
    return ((output - batch[1]) ** 2).sum(), len(batch[1])


def growth(options: argparse.Namespace, root: str) -> Section:
    """Four times as many tensors: four times as long?"""
    few, many = MANY
    times: Times = {}
    medians: dict[int, dict[str, float]] = {}
    for tensors in MANY:
        found = spawn(many_tensors, options.workers, root, tensors, options.rounds, timeout=600)[0]
        medians[tensors] = {name: statistics.median(t) for name, t in found.items()}
        times |= {f"{tensors} tensors, {name}": t for name, t in found.items()}
    goals = [
        Goal(f"{name}: {many} / {few} tensors", medians[many][name] / medians[few][name], many / few * 1.25)
        for name in medians[few]
    ]
    return replace(section_of_times(f"{few} and {many} parameter tensors", times, []), goals=goals)


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many workers, how often, and where."""
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder if not given")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table for each size, and one of what else there is to know."""
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for size in SIZES:
            yield beside_dcp(options, f"{root}/{size}", size)
        yield growth(options, f"{root}/many")
        speed = verifying(Path(root) / SIZES[-1] / "ours")
        times: Times = spawn(training, options.workers, root, options.rounds, timeout=1800)[0]
        times |= spawn(from_memory, 2, root, 3, hosts=["left", "right"], timeout=300)[0]
    medians = {name: statistics.median(t) for name, t in times.items()}
    goals = [
        Goal("time with a checkpoint every ten steps / without", medians[SAVING] / medians[TEN], 1.02),
        Goal("seconds from memory", medians[MEMORY], 2.0),
        Goal("GB/s of verifying on one core", speed, 1.5, least=True),
    ]
    section = section_of_times(
        "a checkpoint within a run, verifying, and 200 MB from another host's memory", times, []
    )
    yield replace(section, goals=goals)


def beside_dcp(options: argparse.Namespace, folder: str, size: str) -> Section:
    """Saving and loading in turns."""
    times: Times = spawn(saving, options.workers, folder, size, options.rounds, timeout=900, backend="gloo")[
        0
    ]
    held = times.pop("bytes a worker")[0]
    medians = {name: statistics.median(t) for name, t in times.items()}
    goals = [
        Goal(f"{mine} / {theirs}", medians[mine] / medians[theirs], most) for mine, theirs, most in GOALS
    ]
    title = f"{size} parameters, {options.workers} workers, {held / 1e6:.0f} MB each"
    note = f"copy / dcp, blocking = {medians['copy'] / medians['dcp, blocking']:.3f}"
    return replace(section_of_times(title, times, []), goals=goals, notes=[note])
