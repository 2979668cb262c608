"""Lossy and periodic strategies on real tasks: they end where they promise to, near the uncompressed run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workload.text import Reader, Size, kept_text, training_text
from shoal import compress, exchange
from shoal.plan.check import check_text, compressor_of
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.evaluate import evaluate
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World

WRITTEN = {"topk": "topk(0.1)", "randomk": "randomk(0.25)", "powersgd": "powersgd(4)"}
COMPRESSED = [f"ddp + {WRITTEN.get(name, name)}" for name in compress.TABLE if name != "none"]
STRATEGIES = [
    *COMPRESSED,
    "zero1 + int8",
    "zero2 + topk(0.1)",
    "local(8)",
    "local(8) + int8",
    "diloco(20)",
    "diloco(20) + int8",
    "diloco(20, fragments=2, delay=2)",
]


def digits() -> TensorDataset:
    found = load_digits()
    images = torch.from_numpy(np.asarray(found.data, dtype=np.float32) / 16.0)
    return TensorDataset(images, torch.from_numpy(np.asarray(found.target, dtype=np.int64)))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_reader() -> nn.Module:
    return Reader(Size(width=32, depth=1))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"), batch[1].numel()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def final_losses(
    world: World, task: str, strategies: list[str], steps: int
) -> dict[str, tuple[float, float]]:
    """The loss before and after: over all digits, or over text that was kept apart."""
    found = {}
    batch = 64 if task == "digits" else 16
    data = digits() if task == "digits" else training_text(batch)
    seen = data if task == "digits" else kept_text()
    for strategy in strategies:
        order = RunConfig(
            model=make_net if task == "digits" else make_reader,
            loss=loss,
            optimizer=adam,
            data=data,
            global_batch=batch,
            strategy=strategy,
        )
        parts = build(order, world, record="")[1]
        before = evaluate(parts, seen, {}, 256).loss
        for number in range(steps):
            view = parts.exchange.work.next(number, steps)
            assert view is not None
            run_step(parts, view)
        found[strategy] = (before, evaluate(parts, seen, {}, 256).loss)
        parts.exchange.close()
    return found


def bound_of(strategy: str) -> float:
    plan = check_text(strategy, 2)
    made = compressor_of(plan)
    return exchange.TABLE[plan.exchange.name].bound + (made.bound if made else 0.0)


@pytest.mark.parametrize(
    ("task", "steps", "strategies"), [("digits", 120, STRATEGIES), ("text", 60, STRATEGIES[::2])]
)
def test_every_strategy_learns_as_much_as_it_promises(task: str, steps: int, strategies: list[str]) -> None:
    """Its bound is the share of what the uncompressed run learns that it may lose."""
    found = spawn(final_losses, 2, task, ["ddp", *strategies], steps, timeout=170)[0]
    before, wanted = found.pop("ddp")
    assert wanted < 0.7 * before, "the task was not learned, so nothing was tested"
    lost = {strategy: (after - wanted) / (before - wanted) for strategy, (_, after) in found.items()}
    for strategy, share in lost.items():
        assert share <= bound_of(strategy), f"{strategy} lost {share:.3f} of what ddp learned; {lost}"
