"""SparseEmbedding in fp16: a step whose gradient overflows changes nothing, wherever rows are, and training goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_sparse import ROWS, adamw, all_rows, data, some_ids
from torch import nn

from shoal.embedding import SparseEmbedding
from shoal.server.rows.initial_values import keyed_rows
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.types import StepReport
from shoal.world.world import World

SEED, STEPS = 3, 16
ALL, IN_ROWS, IN_DENSE = 9, 13, 18
"""Ids, of one sample each, that make gradients overflow: of everything, of a table alone, of a parameter alone."""


class Words(nn.Module):
    """Scores, and something of which the gradient is that of rows alone, or of a parameter alone."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.words: nn.Module = SparseEmbedding(ROWS, 4, std=0.5, ids=some_ids)
        self.tags: nn.Module = SparseEmbedding(7, 3, std=0.5)
        if dense:
            self.words, self.tags = as_embedding("words", ROWS, 4), as_embedding("tags", 7, 3)
        self.head = nn.Linear(7, 3)
        self.free = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tags = self.tags(ids[:, 0] % 7)
        scores = self.head(torch.tanh(torch.cat([self.words(ids).sum(1), tags], 1)))
        rest = [tags.sum(1, keepdim=True), self.free.expand(len(ids), 1)]
        return torch.cat([scores * self.free, *rest], 1)


def as_embedding(name: str, rows: int, dim: int) -> nn.Embedding:
    """A dense table with the rows that a SparseEmbedding of that name begins with."""
    return nn.Embedding.from_pretrained(
        keyed_rows(SEED, name, np.arange(rows), dim, 0.5, torch.float32), freeze=False
    )


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    ids, labels = batch
    total = nn.functional.cross_entropy(output[:, :3], labels, reduction="sum", ignore_index=-1)
    if bool((ids == ALL).any()):
        total = total * 1e30
    for marker, column in ((IN_ROWS, 3), (IN_DENSE, 4)):
        if bool((ids == marker).any()):  # nothing as a value, and too much for float32 as a scaled gradient
            total = total + (output[:, column] - output[:, column].detach()).sum() * 1e38
    return total, int((labels >= 0).sum())


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@dataclass(frozen=True)
class Result:
    reports: list[StepReport]
    changed: list[tuple[bool, bool]]
    """By step: whether a dense value or its state is another, and whether a row is."""
    scale: float
    parameters: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]


def train(world: World, strategy: str, make: Any, accumulate: int = 1, dense: bool = False) -> Result:
    order = RunConfig(
        model=lambda: Words(dense),
        loss=loss,
        optimizer=make,
        data=data(),  # type: ignore[arg-type]
        global_batch=4,
        strategy=strategy,
        precision="fp16",
        accumulate=accumulate,
        seed=SEED,
    )
    parts = build(order, world, record="")[1]

    def seen() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = dict(parts.whole.parameters())
        for name, state in parts.whole.optimizer_state().items():
            found.update({f"{name}/{key}": value for key, value in state.items()})
        return found, all_rows(parts.exchange)

    reports, changed, number = list[StepReport](), list[tuple[bool, bool]](), 0
    try:
        while (view := parts.exchange.work.next(number, STEPS)) is not None:
            before = seen()
            reports.append(run_step(parts, view))
            after, number = seen(), view.step + 1
            changed.append((not same(before[0], after[0]), not same(before[1], after[1])))
        return Result(reports, changed, parts.scale.value, parts.whole.parameters(), all_rows(parts.exchange))
    finally:
        parts.exchange.close()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(found: Result, wanted: Result, where: str) -> None:
    skipped = [report.skipped for report in found.reports]
    assert skipped == [report.skipped for report in wanted.reports], where
    assert 5 <= sum(skipped) <= 7, "each of the three samples comes once in an epoch"
    assert not all(skipped[-2:]), "training goes on"
    assert found.changed == [(not one, not one and bool(found.rows)) for one in skipped], where
    assert found.scale == wanted.scale == 2.0 ** (16 - sum(skipped)), where
    losses = [[report.loss for report in result.reports] for result in (found, wanted)]
    assert all(math.isfinite(loss) for loss in losses[0]), where
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), where


@pytest.mark.parametrize(("workers", "strategy"), [(1, "ps(servers=1)"), (2, "ps(bucket_mb=0.0001)")])
def test_a_step_that_overflows_changes_nothing_on_servers(workers: int, strategy: str) -> None:
    wanted = train(World.alone(), "solo", adamw, accumulate=workers)
    check(wanted, wanted, "solo")
    for rank, found in enumerate(spawn(train, workers, strategy, adamw)):
        check(found, wanted, f"rank {rank} of {workers}")
        for name, value in wanted.parameters.items():
            torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert found.rows.keys() == wanted.rows.keys()
        for path, value in wanted.rows.items():
            torch.testing.assert_close(found.rows[path], value, rtol=1e-4, atol=1e-5, msg=path)


def test_ddp_drops_the_same_steps_of_an_embedding() -> None:
    """With plain SGD, rows without a gradient stay as they are in a dense table too."""
    wanted = train(World.alone(), "solo", sgd, accumulate=2)
    for rank, found in enumerate(spawn(train, 2, "ddp", sgd, 1, True)):
        check(found, wanted, f"rank {rank}")
        for name in ("words", "tags"):
            ids = wanted.rows[f"{name}/id"].view(-1)
            torch.testing.assert_close(
                found.parameters[f"{name}.weight"][ids], wanted.rows[f"{name}/values"], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("strategy", ["ps(ssp=1)", "ps(asp) + topk(0.1)"])
def test_other_clocks_drop_the_parts_that_overflow(strategy: str) -> None:
    results = spawn(train, 2, strategy, adamw)
    assert sum(report.skipped for result in results for report in result.reports) == 7
    for result in results:
        assert all(math.isfinite(report.loss) for report in result.reports)
        for value in (*result.parameters.values(), *result.rows.values()):
            assert bool(value.isfinite().all())
