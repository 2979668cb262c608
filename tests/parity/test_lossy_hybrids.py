"""Compressors and periodic exchanges where one model is held by several workers, or not all of it is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.testing.parity import largest_difference, run_toy, take_step, toy_order
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.build import build
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step import run_step
from shoal.world.world import World

TENSOR = [
    "ddp * tp2 + int8",
    "zero1 * tp2 + topk(0.3)",
    "ddp * tp2 + int4",
    "ddp * tp2 + auto",
    "local(2) * tp2",
]
STAGES = [
    "ddp * pp2(microbatches=2) + topk(0.3)",
    "zero2 * pp2(microbatches=2) + int8",
    "diloco(4) * pp2(microbatches=2)",
]


def replicated(world: World, strategy: str) -> dict[str, torch.Tensor]:
    """The parameters of which every tensor rank has a whole copy, as this one has them."""
    parts = build(toy_order(TOYS["stack"], strategy, precision="fp32"), world, record="")[1]
    for number in range(20 if strategy.endswith("auto") else 8):  # auto takes 14 to decide
        take_step(parts, number)
    cut = parts.whole.layout.pieces
    parts.exchange.close()
    return {
        n: p.detach().clone() for n, p in parts.model.named_parameters() if n not in cut and p.requires_grad
    }


def run_tensor(world: World) -> dict[str, dict[str, torch.Tensor]]:
    return {strategy: replicated(world, strategy) for strategy in TENSOR}


def test_copies_on_tensor_ranks_stay_equal() -> None:
    first, *others = spawn(run_tensor, 4, timeout=150)
    for strategy in TENSOR:
        assert first[strategy], "the toy has no parameter that stays whole"
        for other in others:
            for name, value in first[strategy].items():
                assert torch.equal(value, other[strategy][name].view(value.shape)), f"{strategy}: {name}"


def run_stages(world: World) -> dict[str, object]:
    found: dict[str, object] = {
        s: run_toy(world, TOYS["odd"], s, 20, precision="fp32") for s in ("ddp", *STAGES)
    }
    for strategy in ("ddp * pp2(microbatches=2) + int4", "diloco(4, fragments=2) * pp2(microbatches=2)"):
        try:
            run_toy(world, TOYS["tied"], strategy, 2)
        except ConfigError as error:
            found[strategy] = str(error)
    return found


def test_pipelines_train_near_ddp_and_ties_are_refused() -> None:
    found = spawn(run_stages, 4, timeout=150)[0]
    for strategy in STAGES:
        gap, where = largest_difference(
            dataclasses.replace(found["ddp"], losses=[]), dataclasses.replace(found[strategy], losses=[])
        )
        assert gap < 0.5, f"{strategy}: {gap} at {where}"
    for strategy in found.keys() - {"ddp", *STAGES}:
        assert "a weight that several stages share" in str(found[strategy])


def seen_by_stage(world: World) -> list[float]:
    parts = build(toy_order(TOYS["uneven"], "local(9) * pp2(microbatches=1)"), world, record="")[1]
    for number in range(7):
        take_step(parts, number)
    seen = parts.exchange.numbers()["seen"]
    assert isinstance(seen, list)
    return seen


def test_all_stages_weigh_a_replica_alike() -> None:
    found = spawn(seen_by_stage, 4)
    assert sorted(set(map(tuple, found))) == sorted({tuple(found[0]), tuple(found[-1])})
    by_replica: dict[tuple[float, ...], int] = {}
    for seen in found:
        assert seen[0] > 0
        by_replica[tuple(seen)] = by_replica.get(tuple(seen), 0) + 1
    assert set(by_replica.values()) <= {2, 4}, found


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def last_steps(world: World, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is learned by a run that ends when a delayed sum is due, and the mean of what workers had before its end."""
    order = dataclasses.replace(
        toy_order(TOYS["odd"], "diloco(5, lr=1, momentum=0, delay=2)"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
    parts = build(order, world, record="")[1]
    at_five = torch.zeros(1)
    for number in range(stop):
        view = parts.exchange.work.next(number, stop)
        assert view is not None
        run_step(parts, view)
        if number == 4:
            at_five = flat(parts.exchange.parameters())
    return at_five, flat(parts.exchange.parameters())


def test_a_delayed_sum_due_at_the_last_step_erases_nothing() -> None:
    for before, after in spawn(last_steps, 2, 7):
        assert (after - before).abs().max() > 1e-3, "the steps after the meeting were lost"


class Branches(nn.Module):
    """Two layers of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.step = nn.Linear(5, 3), nn.Linear(5, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        out: torch.Tensor = (self.even if self.step % 2 else self.odd)(x)
        return out


def residual_of(exchange: BucketedExchange, name: str) -> torch.Tensor:
    return torch.cat([o.held.tensor.reshape(-1) for o in exchange.extras(saving=True) if o.held.name == name])


def run_branches(world: World, strategy: str) -> list[tuple[float, float]]:
    """Over the workers, the sum of what the unused layer has not sent: before and after each step that left it out."""
    order = dataclasses.replace(toy_order(TOYS["odd"], strategy, accumulate=1), model=Branches)
    parts = build(order, world, record="")[1]
    assert isinstance(parts.exchange, BucketedExchange)
    found = []
    for number in range(6):
        unused = "even.weight" if number % 2 else "odd.weight"
        sums = [residual_of(parts.exchange, unused)]
        take_step(parts, number)
        sums.append(residual_of(parts.exchange, unused))
        for left in sums:
            world.all_reduce(left).wait()
        found.append((float(sums[0].norm()), float((sums[1] - sums[0]).norm())))
    return found


@pytest.mark.parametrize("strategy", ["ddp + sign", "zero1 + sign"])
def test_what_is_not_used_in_a_step_keeps_what_it_has_not_sent(strategy: str) -> None:
    for found in spawn(run_branches, 2, strategy):
        assert max(size for size, _ in found) > 1e-3, "nothing was left over, so nothing was tested"
        for size, change in found[1:]:  # before the first step nobody knows the order of buckets
            assert change <= 1e-6 * max(size, 1.0), found


def save_or_go_on(world: World, strategy: str, folder: str, steps: int) -> tuple[float, float]:
    """The sum over workers of all that is not sent: as loaded, and after one more backward pass's layout."""
    order = dataclasses.replace(toy_order(TOYS["chain"], strategy), global_batch=12)
    plan, parts = build(order, world, record="")
    checkpoints = Checkpoints(parts, str(plan), CheckpointConfig(root=Path(folder)))
    progress = checkpoints.resume()
    assert isinstance(parts.exchange, BucketedExchange)
    for number in range(progress.step, progress.step + steps):
        take_step(parts, number)
    before = sum_of_unsent(world, parts.exchange)
    parts.exchange.lay_out_again(list(reversed(parts.exchange.order)))
    after = sum_of_unsent(world, parts.exchange)
    if steps:
        checkpoints.save(f"step-{steps}", Progress(steps))
    return before, after


def sum_of_unsent(world: World, exchange: BucketedExchange) -> float:
    """A number that a change of holders must not change: the sum over workers and elements."""
    mine = sum(float(owned.held.tensor.sum()) for owned in exchange.extras(saving=True))
    return float(world.gather_numbers([mine])[:, 0].sum())


def test_what_was_not_sent_moves_to_other_sizes_and_layouts(tmp_path: Path) -> None:
    before = spawn(save_or_go_on, 2, "ddp + topk(0.1)", str(tmp_path), 4)[0]
    assert abs(before[0]) > 1e-3
    assert before[1] == pytest.approx(before[0], rel=1e-9)
    for workers, strategy in ((3, "ddp + topk(0.1)"), (3, "zero1 + topk(0.1)"), (2, "zero2 + sign")):
        loaded, again = spawn(save_or_go_on, workers, strategy, str(tmp_path), 0)[0]
        assert loaded == pytest.approx(before[0], rel=1e-9), strategy
        assert again == pytest.approx(before[0], rel=1e-9), strategy
