"""The training script of pause.py: `shoal run` starts it with a folder and the kind of model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.exchange.ps import Ps
from shoal.server.protocol.view import LEDGER

MODELS = ("small", "rows", "20 M parameters")


def make_model(kind: str) -> nn.Module:
    """One of MODELS."""
    if kind == "rows":
        return nn.Sequential(shoal.SparseEmbedding(10**5, 16), nn.Flatten(), nn.Linear(128, 2))
    width, depth = (64, 0) if kind == "small" else (2048, 5)
    inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), *inner, nn.Linear(width, 2))


def job(folder: Path, kind: str) -> None:
    """The training script: every worker writes down when it made each step; the first one how the servers are."""
    generator = torch.Generator().manual_seed(0)
    if kind == "rows":
        points = torch.randint(10**5, (4096, 8), generator=generator)
        classes = (points[:, 0] > 50_000).long()
    else:
        points = torch.randn(4096, 8, generator=generator)
        classes = (points.sum(1) > 0).long()
    data = torch.utils.data.TensorDataset(points, classes)

    def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()

    run = shoal.Run(
        model=lambda: make_model(kind),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=data,
        global_batch=64,
        clip=None if kind == "rows" else 1.0,
        log=None,
        progress=False,
    )
    exchange = run._context.exchange
    assert isinstance(exchange, Ps)
    with (folder / f"steps-{run.world.rank}").open("a") as file:
        for step in run.steps(10**6):
            file.write(f"{step.number} {time.monotonic()}\n")
            file.flush()
            if run.world.rank == 0:
                view, news = exchange.link.client.view, exchange.link.news
                chain = [view.addresses[server] for server in view.chains[LEDGER]]
                now = {
                    "epoch": view.epoch,
                    "chain": chain,
                    "whole": news.get("whole"),
                    "of": news.get("epoch"),
                }
                (folder / ".status").write_text(json.dumps(now))
                (folder / ".status").rename(folder / "status")


if __name__ == "__main__":
    job(Path(sys.argv[1]), sys.argv[2])
