"""A training script for tests that kill what serves it: every rank writes down its losses, and how the servers are.

Arguments: a folder, how many steps, seconds to sleep in each, and "rows" for a model most of which is rows on servers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import shoal
from shoal.exchange.ps import Ps

folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sparse = sys.argv[4:] == ["rows"]
generator = torch.Generator().manual_seed(0)
points = torch.randn(4096, 8, generator=generator)
ids = (torch.rand(4096, 4, generator=generator) ** 2 * 2000).long()
targets = points.sum(1) > 0 if not sparse else ids.sum(1) % 2
data = torch.utils.data.TensorDataset(ids if sparse else points, targets.long())


class Words(torch.nn.Module):
    """Two tables: of one it is known which rows come next."""

    def __init__(self) -> None:
        super().__init__()
        self.words = shoal.SparseEmbedding(2000, 8, std=0.5, ids=lambda batch: batch[0])
        self.tags = shoal.SparseEmbedding(50, 8, std=0.5)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.words(batch).sum(1) + self.tags(batch[:, 0] % 50)))
        return out


def dense() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    time.sleep(pause)
    return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


run = shoal.Run(
    model=Words if sparse else dense,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    data=data,
    global_batch=64,
    strategy="ps",
    clip=1.0,
    deterministic=True,
    precision="fp64" if sparse else "fp32",
    log=None,
    progress=False,
)
exchange = run._context.exchange
with (folder / f"losses-{run.world.rank}").open("a") as file:
    for step in run.steps(steps):
        file.write(json.dumps([step.number, step.loss, time.time()]) + "\n")
        file.flush()
        if isinstance(exchange, Ps):
            now = {"step": step.number, "epoch": exchange.link.client.view.epoch, **exchange.link.news}
            draft = folder / f".status-{run.world.rank}"
            draft.write_text(json.dumps(now))
            draft.rename(folder / f"status-{run.world.rank}")
whole = run.state_dict()
if run.world.rank == 0:
    for name, columns in exchange.tables.pieces():
        for column, tensor in columns.items():
            path = f"{name}/{column}"
            whole[path] = torch.cat([whole.get(path, tensor[:0]), tensor])
    torch.save(whole, folder / "parameters.pt")
