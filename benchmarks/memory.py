"""How much memory the states of a model take under each exchange, beside the formula.

    scripts/bench memory

Each worker's share of private and shared pages (PSS) is read from the kernel after some steps with a tiny batch,
and what it had before the model was made is taken off. The activations and temporaries of one worker, measured
alone under solo, are taken off as well, so what is left is parameters, gradients and optimizer state.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from exchange import SIZES, Case, Transformer, shoal_loop

from shoal.exchange import TABLE
from shoal.testing.spawn import spawn
from shoal.world.world import World


def proportional() -> int:
    """Bytes of this process, shared pages counted in equal parts to all who map them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say Pss in smaps_rollup")


def settle() -> None:
    """Give back what is free: garbage to the allocator, and the allocator's own slack to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(world: World, size: str, strategy: str) -> int:
    """What a worker gained by having the model and training it."""
    torch.set_num_threads(1)
    warm = torch.nn.Linear(8, 8)
    warm(torch.randn(2, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    settle()
    world.barrier()
    before = proportional()
    world.barrier()
    step = shoal_loop(world, Case(size, 1, 1, 1, ()), strategy)
    for number in range(3):
        step(number)
    settle()
    world.barrier()
    after = proportional()
    world.barrier()  # nobody leaves, and unmaps, while another still counts
    return after - before


def main() -> None:
    missed = 0
    print("extra: activations, temporaries and allocator slack of one worker, measured alone under solo")
    print("size   exchange  workers  formula MB  measured MB  extra MB  ratio")
    for size in SIZES:
        parameters = sum(p.numel() for p in Transformer(*SIZES[size]).parameters())
        (alone,) = spawn(measure, 1, size, "solo", timeout=600)
        extra = (
            alone - 3 * 4 * parameters
        )  # at rest, solo holds parameters and two numbers of Adam; no gradient
        for workers in (2, 4):
            for name in ("ddp", "zero1", "zero2", "shared"):
                found = spawn(measure, workers, size, name, timeout=600)
                wanted = TABLE[name].memory(parameters, workers).total
                mean = sum(found) / workers
                ratio = (mean - extra) / wanted
                missed += ratio > 1.1
                mark = "" if ratio <= 1.1 else "  MISS (goal 1.10)"
                row = f"{size:<6} {name:<9} {workers:>7} {wanted / 1e6:>11.1f} {mean / 1e6:>12.1f}"
                row += f" {extra / 1e6:>9.1f} {ratio:>6.3f}"
                print(row + mark, flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
