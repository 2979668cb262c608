"""A run that nobody holds any more is collected with its parameters, though the script goes on: as in a notebook."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.testing.spawn import spawn
from shoal.world.world import World

STRATEGIES = ["ddp", "zero1 + int8", "zero3", "shared", "local(2)"]


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((output - batch[1]) ** 2).sum(), batch[1].numel()


def train(strategy: str, folder: str) -> list[weakref.ref[Any]]:
    data = torch.utils.data.TensorDataset(torch.ones(32, 5), torch.ones(32, 3))
    run = shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        data=data,
        global_batch=8,
        strategy=strategy,
        checkpoint=f"{folder}/{strategy[:5]}",
        checkpoint_every=2,
        log=None,
        progress=False,
    )
    list(run.steps(3))
    return [weakref.ref(one) for one in (run, run._context, *run.module.parameters())]


def left_over(strategies: list[str], folder: str) -> dict[str, list[str]]:
    found = {}
    for strategy in strategies:
        references = train(strategy, folder)
        gc.collect()
        found[strategy] = [type(one).__name__ for held in references if (one := held()) is not None]
    return found


def forget(world: World, folder: str) -> tuple[dict[str, list[str]], int]:
    told = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in told.items()})
    found = left_over(STRATEGIES, folder)
    ending = [thread for thread in threading.enumerate() if thread.name == "shoal-comm"]
    for thread in ending:
        thread.join(timeout=20)
    return found, sum(thread.is_alive() for thread in ending)


def test_a_forgotten_run_is_collected(tmp_path: Path) -> None:
    assert left_over(["solo", "ddp"], str(tmp_path)) == {"solo": [], "ddp": []}
    for found, threads in spawn(forget, 2, str(tmp_path)):
        assert found == {strategy: [] for strategy in STRATEGIES}
        assert threads == 0
