"""What Shoal itself costs: `solo` beside the bare hand-written torch loop, on a model whose step takes 2 ms.

    scripts/bench overhead

Goals: a step takes at most 1.03 times the bare one's; meter, event log and progress lines take at most 1 % of it.

Both loops take the same samples from the same data set, with the same fused optimizer, in the same process,
alternating in short blocks; Shoal's also writes its event log and progress lines, as it does for a person.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.report.result import Column, Goal, Row, Section
from shoal.report import PHASES, Console, EventLog, Meter, peak_memory
from shoal.types import StepReport

BLOCKS, STEPS = 40, 50
GOAL, REPORT_GOAL = 1.03, 0.01
NEAR = 1.7e-3
"""Seconds: a step that takes as long is near enough to 2 ms."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Bare:
    """The loop a person writes by hand."""

    def __init__(self, data: TensorDataset, batch: int) -> None:
        self.model = net()
        self.optimizer = adamw(list(self.model.parameters()))
        self.data, self.batch = data, batch
        self.order = torch.randperm(len(data))
        self.at = 0

    def step(self) -> None:
        ids = self.order[self.at : self.at + self.batch]
        self.at = (self.at + self.batch) % (len(self.data) - self.batch)
        x, y = (tensor[ids] for tensor in self.data.tensors)
        self.optimizer.zero_grad()
        value = F.cross_entropy(self.model(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        value.item()  # a person looks at the loss


def contest(blocks: int) -> tuple[int, dict[str, list[float]]]:
    """The batch whose bare step is nearest 2 ms on this machine, and seconds a step in each block."""
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    for batch in (64, 128, 256, 512):
        bare = Bare(data, batch)
        if min(block_of(bare.step) for _ in range(5)) >= NEAR:
            break
    times: dict[str, list[float]] = {"bare": [], "shoal solo": []}
    with tempfile.TemporaryDirectory() as folder:
        run = shoal.Run(
            model=net, loss=loss, optimizer=adamw, data=data, global_batch=batch, strategy="solo", log=folder
        )
        steps = run.steps(10**9)
        for _ in range(blocks):
            times["bare"].append(block_of(bare.step))
            times["shoal solo"].append(block_of(lambda: next(steps)))
        steps.close()  # type: ignore[attr-defined]
    return batch, times


def report_cost() -> float:
    """Seconds a step pays for being measured and written down."""
    meter, memory = Meter(), peak_memory()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        log, console = EventLog(f"{folder}/events.jsonl"), Console(10**9, stream=nowhere)

        def step() -> None:
            meter.start()
            for phase in PHASES:
                meter.mark(phase)
            t = meter.stop()
            report = StepReport(
                1, 0, 2.0, 64, 64.0, t.seconds, t.data, t.compute, t.exposed, t.update, 0, memory, 0.1
            )
            console.update(report)
            log.write(report)

        took = statistics.median(block_of(step) for _ in range(BLOCKS))
        log.close()
        console.close()
    return took


def block_of(step: Callable[[], object]) -> float:
    """Seconds of one of several steps in a row."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--blocks", type=int, default=BLOCKS)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One table."""
    batch, times = contest(options.blocks)
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratio = statistics.median(ours / bare for bare, ours in zip(*times.values(), strict=True))
    goals = [
        Goal("shoal / bare, median of the blocks", ratio, GOAL),
        Goal("report / step: meter, event log, plain lines", report_cost() / medians["bare"], REPORT_GOAL),
    ]
    columns = [Column("loop"), Column("step ms", "{:.3f}")]
    rows: list[Row] = [[name, median * 1e3] for name, median in medians.items()]
    yield Section(
        f"one process, batch {batch}, {options.blocks} blocks of {STEPS} steps", columns, rows, goals
    )
