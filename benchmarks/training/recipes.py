"""What recipes add to a step, and what adapters save.

    scripts/bench recipes

A model of three linear layers of 1,024 learns in batches of 256, alone on one core. Of every step, the processor time
in the moments of a recipe is compared with that of the whole step; so what else runs on the machine counts for both.
Goals: masks and averages take at most 2 % of a step; the optimizer's state under `lora` takes at most 1.1 times two
numbers for each one that learns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.report.result import Column, Goal, Row, Section
from shoal.recipe.recipes import Recipes

WIDTH, BATCH, STEPS = 1024, 256, 60
GOAL, MEMORY_GOAL = 0.02, 1.1
MOMENTS = ("before_step", "on_gradients", "applied", "published")
RECIPES = ("prune(0.8, begin=2)", "prune(0.5, begin=2, pattern='2:4')", "ema(0.999)", "freeze(0, until=1000)")
"""More weights go while nothing is measured: what is measured is what every later step pays."""


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def run_of(recipes: str) -> shoal.Run:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(4096, WIDTH, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    )
    return shoal.Run(
        model=net,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        data=data,
        global_batch=BATCH,
        strategy="solo",
        recipes=recipes,
        log=None,
        progress=False,
    )


def share_of(recipes: str, steps: int) -> tuple[float, float]:
    """Processor seconds of a step, and the share of them that a recipe takes: medians."""
    run = run_of(recipes)
    spent = [0.0]
    acting: Recipes = run._context.recipes
    for moment in MOMENTS:
        setattr(acting, moment, timed(getattr(acting, moment), spent))
    whole, shares = [], []
    began = time.thread_time()
    for step in run.steps(steps):
        took = time.thread_time() - began
        if step.number > 10:
            whole.append(took)
            shares.append(spent[0] / took)
        spent[0] = 0.0
        began = time.thread_time()
    return statistics.median(whole), statistics.median(shares)


def timed(act: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    """The same, which adds up its processor time."""

    def measured(*args: float) -> None:
        began = time.thread_time()
        act(*args)
        spent[0] += time.thread_time() - began

    return measured


def adapter_memory() -> tuple[int, float]:
    """Numbers that learn under `lora`, and bytes of the optimizer's state over two floats for each of them."""
    run = run_of("lora(8, train=6)")
    for _ in run.steps(2):
        pass
    learning = sum(p.numel() for p in run.module.parameters() if p.requires_grad)
    state = run.optimizer.state.values()
    held = sum(t.nbytes for entries in state for t in entries.values() if isinstance(t, torch.Tensor))
    return learning, held / (8 * learning)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--steps", type=int, default=STEPS)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a recipe, and one table for adapters."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    goals = []
    for recipes in RECIPES:
        step, share = share_of(recipes, options.steps)
        rows.append([recipes, step * 1e3, 100 * share])
        goals.append(Goal(f"share of a step: {recipes}", share, GOAL))
    columns = [Column("recipes="), Column("step ms", "{:.1f}"), Column("of it %", "{:.2f}")]
    yield Section(f"what every step pays, {options.steps} steps of {BATCH} samples", columns, rows, goals)
    learning, ratio = adapter_memory()
    total = sum(p.numel() for p in net().parameters())
    yield Section(
        "adapters",
        [
            Column("recipes="),
            Column("learn"),
            Column("of all %", "{:.1f}"),
            Column("state / formula", "{:.3f}"),
        ],
        [["lora(8, train=6)", f"{learning:,}", 100 * learning / total, ratio]],
        [Goal("optimizer state / two numbers for each that learns", ratio, MEMORY_GOAL)],
    )
