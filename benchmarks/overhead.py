"""What Shoal itself costs: `solo` beside the bare hand-written torch loop, on a model whose step takes 2 ms.

    scripts/bench overhead

Both loops take the same samples from the same data set, with the same fused optimizer, in the same process,
alternating in short blocks; Shoal's also writes its event log and progress lines, as it does for a person.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

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
    sys.exit(ratio > GOAL)


def _block(step) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    main()
