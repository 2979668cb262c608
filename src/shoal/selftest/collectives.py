"""Sums, gathers and scatters: right, how fast, and how fast torch's own backend is with the same workers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.selftest.row import Answer
from shoal.world.world import World

SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "16 MB": 1 << 22}
"""Elements of float32: the first shows what a call costs, the last what the way carries."""
TIMES = 12
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
Call = Callable[[], None]


def subjects() -> list[str]:
    return [f"{kind} of {size}" for kind in KINDS for size in SIZES]


def measure(world: World, subject: str) -> Answer:
    """Ours and torch's by turns, the median of each. Collective."""
    if world.group is None:
        raise ConfigError("one worker has nobody to talk to; use --workers 2 or more.")
    kind, _, size = subject.partition(" of ")
    count = SIZES[size] // world.size * world.size
    whole = torch.empty(count, dtype=torch.float32, device=world.device)
    part = torch.empty(count // world.size, dtype=torch.float32, device=world.device)
    ours = _ours(world, kind, whole, part)
    theirs, name = _theirs(world, kind, whole, part)
    for call in (ours, theirs):
        wrong = _wrong(world, kind, whole, part, call)
        if wrong:
            who = "Shoal's" if call is ours else name
            return Answer(False, f"{who} {kind} gives wrong numbers: {wrong}")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TIMES):
        for call, taken in zip((ours, theirs), times, strict=True):
            taken.append(_seconds(world, call))
    mine, other = (median(taken) for taken in times)
    moved = whole.nbytes
    said = f"{_speed(moved, mine)}; {name}: {_speed(moved, other)}"
    return Answer(True, said, {"seconds": mine, "seconds of torch": other, "bytes": float(moved)})


def _ours(world: World, kind: str, whole: torch.Tensor, part: torch.Tensor) -> Call:
    if kind == "all_reduce":
        return lambda: _wait(world.all_reduce(whole).wait())
    if kind == "all_gather":
        return lambda: _wait(world.all_gather(whole, part).wait())
    return lambda: _wait(world.reduce_scatter(part, whole).wait())


def _theirs(world: World, kind: str, whole: torch.Tensor, part: torch.Tensor) -> tuple[Call, str]:
    """The functions of torch.distributed on a group of its own; what its backend is called."""
    name = "nccl" if world.device.type == "cuda" else "gloo"
    group = dist.new_group(list(world.members), backend=name)
    if kind == "all_reduce":
        return lambda: _wait(dist.all_reduce(whole, group=group)), name
    if kind == "all_gather":
        return lambda: _wait(dist.all_gather_into_tensor(whole, part, group=group)), name
    if name == "gloo":  # which has no reduce_scatter for one tensor in every version
        return lambda: _wait(dist.all_reduce(whole, group=group)), "gloo's all_reduce"
    return lambda: _wait(dist.reduce_scatter_tensor(part, whole, group=group)), name


def _wait(done: object) -> None:
    del done


def _wrong(world: World, kind: str, whole: torch.Tensor, part: torch.Tensor, call: Call) -> str:
    """What is not as it must be after one call; empty if all is."""
    whole.fill_(world.rank + 1)
    part.fill_(world.rank + 1)
    call()
    total = world.size * (world.size + 1) / 2
    checked, wanted = whole, torch.full_like(whole, total)
    if kind == "all_gather":
        ranks = torch.arange(1, world.size + 1, dtype=whole.dtype, device=whole.device)
        wanted = ranks.repeat_interleave(part.numel())
    elif kind == "reduce_scatter" and not bool((whole == total).all()):
        checked, wanted = part, torch.full_like(part, total)
    bad = int((checked != wanted).sum())
    return f"{bad} of {checked.numel()} elements" if bad else ""


def _seconds(world: World, call: Call) -> float:
    world.barrier()
    _settle(world.device)
    begun = perf_counter()
    call()
    _settle(world.device)
    return perf_counter() - begun


def _settle(device: torch.device) -> None:
    """Until a card has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _speed(nbytes: int, seconds: float) -> str:
    """Microseconds of a small message, gigabytes a second of a large one."""
    return f"{seconds * 1e6:.0f} µs" if nbytes < 1 << 16 else f"{nbytes / seconds / 1e9:.2f} GB/s"
