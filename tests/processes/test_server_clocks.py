"""Clocks, aggregates and backup workers of real parameter-server runs, and how they go on from checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.exchange.ps import Ps
from shoal.testing.parity import run_toy, take_step, toy_order, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.build import build
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.step import run_step
from shoal.world.world import World

STEPS = 12


def claims(world: World, strategy: str, slow: int) -> tuple[list[tuple[int, int, int]], list[Any], float]:
    """Train with one slow worker: (step, part, oldest step under way) of each claim, staleness, final loss."""
    parts = toy_parts(world, TOYS["odd"], strategy)
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    seen, report = [], None
    try:
        while (view := exchange.work.next(0, STEPS)) is not None:
            seen.append((view.step, exchange._claim.part, exchange._work.floor))
            time.sleep(0.05 if world.rank == slow else 0.0)
            report = run_step(parts, view)
        world.barrier()
        status = exchange.status()
    finally:
        exchange.close()
    return seen, status["staleness"], report.loss if report is not None else float("nan")


@pytest.mark.parametrize(
    ("strategy", "bound"), [("ps(ssp=2)", 2), ("ps(ssp=0)", 0), ("ps(asp)", STEPS), ("ps(dssp(1, 3))", 3)]
)
def test_nobody_is_further_ahead_than_the_clock_allows(strategy: str, bound: int) -> None:
    found = spawn(claims, 3, strategy, 1)
    everything = sorted((step, part) for seen, _, _ in found for step, part, _ in seen if part >= 0)
    assert everything == [(step, part) for step in range(STEPS) for part in range(3)], "each part once"
    assert max(step - oldest for seen, _, _ in found for step, _, oldest in seen) <= bound
    staleness = dict(map(tuple, found[0][1]))
    assert sum(staleness.values()) == STEPS * 3
    if bound:
        assert max(staleness) > 0, "nobody was ever ahead, though one was slow"
        most = max(len(found[0][0]), len(found[2][0]))
        assert len(found[1][0]) < most, "the slow worker should get fewer parts"


def test_a_clock_may_change_during_the_run() -> None:
    found = spawn(claims, 3, "ps(bsp, then=asp, after=6)", 1)
    early = [(step, oldest) for seen, _, _ in found for step, _, oldest in seen if step < 6]
    assert all(step == oldest for step, oldest in early)
    late = dict.fromkeys(range(6, STEPS), 0)
    for seen, _, _ in found:
        for step, part, _ in seen:
            late[step] = late.get(step, 0) + (part >= 0)
    assert all(late[step] == 3 for step in range(6, STEPS))


def losses(world: World, strategy: str, bad: int, steps: int) -> tuple[float, float]:
    """The first and the last loss, with one worker whose gradients are nonsense."""
    order = toy_order(TOYS["odd"], strategy)

    def loss(output: torch.Tensor, batch: Any) -> Any:
        total, count = order.loss(output, batch)
        # Only the gradient is wrong: what the loss says is what it is.
        return (total + 1e6 * (total - total.detach()) if world.rank == bad else total), count

    parts = build(dataclasses.replace(order, loss=loss, clip=None), world, record="")[1]
    try:
        found = [take_step(parts, number).loss for number in range(steps)]
    finally:
        parts.exchange.close()
    return found[0], found[-1]


def test_one_bad_worker_spoils_the_mean_and_not_the_median() -> None:
    weighted = spawn(losses, 4, "ps(servers=1)", 2, 25)[0]
    median = spawn(losses, 4, "ps(servers=1, aggregate=median)", 2, 25)[0]
    trimmed = spawn(losses, 4, "ps(servers=1, aggregate=trimmed(0.25))", 2, 25)[0]
    assert median[1] < 0.9 * median[0]
    assert trimmed[1] < 0.9 * trimmed[0]
    assert weighted[1] > max(median[1], trimmed[1])


def with_backup(world: World) -> tuple[list[int], list[float]]:
    """Three workers of which one is slow and need not be waited for: the steps it was counted in."""
    parts = toy_parts(world, TOYS["odd"], "ps(servers=1, backup=1)")
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    counted, found = [], []
    try:
        while (view := exchange.work.next(0, STEPS)) is not None:
            time.sleep(0.15 if world.rank == 2 else 0.0)
            found.append(run_step(parts, view).loss)
            counted.append(len(exchange._claim.tally.get("parts", ())))
        world.barrier()
    finally:
        exchange.close()
    return counted, found


def test_backup_workers_are_not_waited_for() -> None:
    (first, _), _, _ = spawn(with_backup, 3)
    assert first.count(2) > STEPS // 2, "most steps should have done without the slow worker"


def train_and_save(world: World, strategy: str, folder: str, steps: int) -> tuple[int, list[float], Any, Any]:
    """Up to so many steps, going on from a checkpoint if there is one; saves at the end."""
    parts = toy_parts(world, TOYS["accumulated"], strategy)
    checkpoints = Checkpoints(parts, strategy, CheckpointConfig.of(folder, 100, 3, ""))
    try:
        progress = checkpoints.resume() if parts.exchange.begins else None
        begun = 0 if progress is None else progress.step
        parts.exchange.start(begun, parts.join_state())
        found = []
        while (view := parts.exchange.work.next(begun, steps)) is not None:
            found.append(run_step(parts, view).loss)
            if progress is not None:
                progress.step = view.step + 1
            if view.step + 1 == steps:
                break
        if world.rank == 0:
            assert progress is not None
            checkpoints.save(f"step-{steps}", progress)
        world.barrier()
        return begun, found, parts.exchange.parameters(), parts.exchange.optimizer_state()
    finally:
        parts.exchange.close()


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    wanted = run_toy(
        World.alone(), TOYS["accumulated"], "solo", steps=8, accumulate=2 * TOYS["accumulated"].accumulate
    )
    first = spawn(train_and_save, 2, "ps(bucket_mb=0.002)", str(tmp_path), 5)
    second = spawn(train_and_save, 2, "ps(servers=3, bucket_mb=0.004)", str(tmp_path), 8)
    assert (first[0][0], second[0][0]) == (0, 5)
    assert first[0][1] + second[0][1] == pytest.approx(wanted.losses, rel=1e-12)
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(second[1][2][name], value, rtol=1e-11, atol=1e-12)
    for name, entries in wanted.state.items():
        for key, value in entries.items():
            torch.testing.assert_close(second[0][3][name][key], value, rtol=1e-10, atol=1e-12)


def disagree(world: World) -> str:
    model = torch.nn.Linear(5, 3 if world.rank else 2)
    order = dataclasses.replace(toy_order(TOYS["odd"], "ps(servers=1)"), model=lambda: model)
    try:
        parts = build(order, world, record="")[1]
        parts.exchange.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_workers_with_other_models_are_refused() -> None:
    said = spawn(disagree, 2)
    assert any("workers disagree on the model" in text and "weight" in text for text in said), said
