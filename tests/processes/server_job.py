"""A training script for tests that kill what serves it: rank 0 writes down every loss, and how the servers are."""

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
points = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    time.sleep(pause)
    return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


run = shoal.Run(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)),
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    data=data,
    global_batch=64,
    strategy="ps",
    clip=1.0,
    deterministic=True,
    log=None,
    progress=False,
)
exchange = run._parts.exchange
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
    torch.save(whole, folder / "parameters.pt")
