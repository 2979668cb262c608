"""Losses that compare samples with each other: with `run.gather`, equal to a plain program on the whole batch.

Two ways to write them: the loss of the whole batch on every worker, and on each worker the part that its own rows are
responsible for. Both with shares that are not equal, and with steps that leave workers without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from plain import plain_loop
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import ConfigError
from shoal.testing.parity import ParityTrace, largest_difference
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.evaluate import evaluate
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World

STEPS = 5
"""The epoch has three, of 8, 8 and 2 samples."""


class TwoTowers(nn.Module):
    """As in CLIP: two encoders and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return (
            F.normalize(self.image(pair[0]), dim=1),
            F.normalize(self.text(pair[1]), dim=1),
            self.scale.exp(),
        )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images, texts = torch.randn(18, 5, generator=generator), torch.randn(18, 3, generator=generator)
    return TensorDataset(images, texts, torch.randint(0, 4, (18,), generator=generator))


Rows = Callable[[torch.Tensor], torch.Tensor]


def clip(output: Any, _: Any, gather: Rows) -> torch.Tensor:
    """CLIP's loss as it is written for one process, but for `gather`."""
    image, text, scale = output
    image, text = gather(image), gather(text)
    logits = scale * image @ text.T
    wanted = torch.arange(len(image))
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


def clip_of_own_rows(output: Any, batch: Any, gather: Rows) -> tuple[torch.Tensor, int]:
    """The same, each worker its own rows: what is gathered is compared with them."""
    image, text, scale = output
    images, texts = gather(image), gather(text)
    wanted = (gather(batch[0]) == batch[0][:, None]).all(2).int().argmax(1)
    one = F.cross_entropy(scale * image @ texts.T, wanted, reduction="sum")
    other = F.cross_entropy(scale * text @ images.T, wanted, reduction="sum")
    return (one + other) / 2, len(image)


def simclr(output: Any, _: Any, gather: Rows) -> torch.Tensor:
    """NT-Xent: the two views of a sample against those of all others."""
    views = torch.cat([gather(output[0]), gather(output[1])])
    half = len(views) // 2
    alike = (views @ views.T / 0.5).masked_fill(torch.eye(2 * half, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(alike, torch.arange(2 * half).roll(half))


def triplet(output: Any, batch: Any, gather: Rows) -> torch.Tensor:
    """Batch-hard: the farthest of the same label, the nearest of another."""
    rows, labels = gather(output[0] * output[2]), gather(batch[2])
    apart = (rows[:, None] - rows).square().sum(2)
    same = labels[:, None] == labels
    worst = apart.masked_fill(~same, float("-inf")).max(1).values
    nearest = apart.masked_fill(same, 100.0).min(1).values
    return (F.relu(worst - nearest + 0.5) + 0.01 * output[1].mean() * 0).mean()


LOSSES = {"clip": clip, "own rows": clip_of_own_rows, "simclr": simclr, "triplet": triplet}


def order_of(strategy: str, loss: Any, accumulate: int = 1, metrics: Any = None) -> RunConfig:
    return RunConfig(
        model=TwoTowers,
        loss=loss,
        inputs=lambda batch: (batch[0], batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=data(),
        global_batch=8,
        strategy=strategy,
        precision="fp64",
        clip=0.5,
        seed=3,
        accumulate=accumulate,
        metrics=metrics or {},
    )


def run(world: World, strategy: str, name: str, accumulate: int = 1) -> tuple[ParityTrace, list[float]]:
    """Losses and parameters; and a metric of each step that gathers too, and the loss over the data set afterwards."""

    def loss(output: Any, batch: Any) -> Any:
        return LOSSES[name](output, batch, parts.gather)  # as a script's loss uses `run`, which comes later

    def nearest(output: Any, _: Any) -> torch.Tensor:
        image, text = parts.gather(output[0]), parts.gather(output[1])
        return (image @ text.T).max(1).values.mean()

    parts = build(order_of(strategy, loss, accumulate, {"nearest": nearest}), world, record="")[1]
    try:
        losses, measured = [], []
        while len(losses) < STEPS and (view := parts.exchange.work.next(len(losses), STEPS)) is not None:
            report = run_step(parts, view)
            losses.append(report.loss)
            measured.append(report.metrics["nearest"])
        measured.append(evaluate(parts, data(), {}, 8).loss)
        return ParityTrace(losses, parts.whole.parameters()), measured
    finally:
        parts.exchange.close()


@cache
def plain(name: str) -> ParityTrace:
    loss = clip if name == "own rows" else LOSSES[name]

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = loss(model((batch[0], batch[1])), batch, lambda tensor: tensor)  # type: ignore[assignment]
        return found

    return plain_loop(order_of("solo", clip), mean_loss, STEPS)


CELLS = {
    2: [("ddp", "clip"), ("zero2", "triplet"), ("shared", "simclr"), ("zero3 * tp2", "clip")],
    3: [
        ("ddp(bucket_mb=0.001)", "simclr"),
        ("ddp", "own rows"),
        ("zero1", "clip"),
        ("zero2(bucket_mb=0.001)", "own rows"),
        ("zero3", "clip"),
        ("zero3", "own rows"),
        ("shared", "triplet"),
    ],
    4: [("ddp * tp2", "clip"), ("ddp * tp2", "own rows"), ("zero3(replicas=2)", "simclr")],
}


def run_cells(
    world: World, cells: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[ParityTrace, list[float]]]:
    return {cell: run(world, *cell) for cell in cells}


@pytest.mark.parametrize(("workers", "backend"), [(2, "auto"), (3, "auto"), (4, "auto"), (3, "gloo")])
def test_a_loss_over_the_global_batch_equals_one_process(workers: int, backend: str) -> None:
    cells = CELLS[workers] if backend == "auto" else [("ddp", "own rows"), ("zero1", "clip")]
    traces = spawn(run_cells, workers, cells, timeout=150, backend=backend)
    for strategy, name in cells:
        for rank, found in enumerate(traces):
            gap, where = largest_difference(plain(name), found[strategy, name][0])
            assert gap < 1e-12, f"{name} under {strategy}, rank {rank}: {gap:.2e} at {where}"
            alone = run(World.alone(), "solo", name)
            assert found[strategy, name][1] == pytest.approx(alone[1], rel=1e-12)
            assert largest_difference(plain(name), alone[0])[0] < 1e-12


def refusals(world: World) -> list[str]:
    found = []
    for strategy, accumulate in (("ddp", 2), ("ddp * pp2", 1), ("local(2)", 1)):
        try:
            run(world, strategy, "clip", accumulate)
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_gathered_is_refused() -> None:
    for said in spawn(refusals, 2):
        assert len(said) == 3
        assert "run.gather needs the whole global batch at once: accumulate=2 computes" in said[0]
        assert (
            "loss= uses 'parts', which is not there yet; define it before. run.gather cannot work in"
            in said[1]
        )
        assert "under local(2) workers need not be at the same step; use ddp" in said[2]
