"""What Shoal itself costs: `solo` beside the bare hand-written torch loop, on a model whose step takes 2 ms.

    scripts/bench overhead

Both loops take the same samples from the same data set, with the same fused optimizer, in the same process,
alternating in short blocks; Shoal's also writes its event log and progress lines, as it does for a person.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.report import PHASES, Console, EventLog, Meter, peak_memory
from shoal.types import StepReport

BLOCKS, STEPS, GOAL = 40, 50, 1.03


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
        value.backward()
        self.optimizer.step()
        value.item()  # a person looks at the loss


def main() -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    with tempfile.TemporaryDirectory() as folder:
        for batch in (64, 128, 256, 512):  # find the batch whose bare step is nearest 2 ms on this machine
            bare = Bare(data, batch)
            took = min(_block(bare.step) for _ in range(5))
            if took >= 1.7e-3:
                break
        run = shoal.Run(
            model=net, loss=loss, optimizer=adamw, data=data, global_batch=batch, strategy="solo", log=folder
        )
        steps = run.steps(10**9)
        times: dict[str, list[float]] = {"bare": [], "shoal": []}
        for _ in range(BLOCKS):
            times["bare"].append(_block(bare.step))
            times["shoal"].append(_block(lambda: next(steps)))
        steps.close()
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratio = statistics.median(s / b for s, b in zip(times["shoal"], times["bare"], strict=True))
    print(
        f"batch {batch}: bare {medians['bare'] * 1e3:.3f} ms, shoal solo {medians['shoal'] * 1e3:.3f} ms a step"
    )
    print(
        f"{'ok  ' if ratio <= GOAL else 'MISS'} shoal / bare = {ratio:.3f} (goal {GOAL}), medians of {BLOCKS} blocks"
    )
    share = report_cost() / medians["bare"]
    print(
        f"{'ok  ' if share <= 0.01 else 'MISS'} report / step = {share:.4f} (goal 0.01): meter, event log, plain lines"
    )
    sys.exit(ratio > GOAL or share > 0.01)


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

        took = statistics.median(_block(step) for _ in range(BLOCKS))
        log.close()
        console.close()
    return took


def _block(step) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    main()
