"""A script as a user writes it, of which one worker kills itself in the middle: run by `lost_worker.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.train.run import Run

STEPS = 8
DIES_AFTER = 5


def train(out: Path, dies: str) -> None:
    """Train; rank 0 leaves what has come out. `dies`: a file that is there once a worker has been killed."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 5, generator=generator, dtype=torch.float64, device="cpu")
    y = (x.sum(1) > 0).long()

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    run = Run(
        model=lambda: nn.Linear(5, 2),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=TensorDataset(x, y),
        global_batch=16,
        precision="fp64",
        log=None,
        progress=False,
    )
    first = 0
    for step in run.steps(STEPS):
        first = first or step.number
        if dies and run.world.rank == 1 and step.number >= DIES_AFTER and not Path(dies).exists():
            Path(dies).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    weights = run.state_dict()
    if run.world.rank == 0:
        values = torch.cat([weights[name].reshape(-1).double().cpu() for name in sorted(weights)])
        out.write_text(json.dumps({"first": first, "weights": values.tolist()}))


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
