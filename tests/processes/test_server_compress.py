"""Compressed gradients on their way to servers: as good as uncompressed ones, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.exchange.ps import Ps
from shoal.testing.parity import largest_difference, run_toy, take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World

STEPS = 60


def train(world: World, strategy: str) -> tuple[float, float, float]:
    """The mean loss of the first and last steps, and bytes sent a step."""
    parts = toy_parts(world, TOYS["odd"], strategy, precision="fp32")
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    losses, sent = [], 0
    try:
        while (view := exchange.work.next(0, STEPS)) is not None:
            report = run_step(parts, view)
            losses.append(report.loss)
            sent += report.bytes_sent
        world.barrier()
        return sum(losses[:4]) / 4, sum(losses[-4:]) / 4, sent / len(losses)
    finally:
        exchange.close()


@pytest.fixture(scope="module")
def uncompressed() -> tuple[float, float, float]:
    return spawn(train, 2, "ps(servers=1, bucket_mb=0.004)")[0]


def test_none_changes_nothing() -> None:
    wanted = run_toy(World.alone(), TOYS["odd"], "solo", 6, accumulate=2)
    for found in spawn(run_toy, 2, TOYS["odd"], "ps(servers=1) + none", 6):
        assert largest_difference(wanted, found)[0] < 1e-12


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ("+ int8", 0.02),
        ("+ topk(0.1)", 0.25),
        ("+ randomk(0.25)", 0.35),
        ("+ sign", 0.35),
        ("+ bf16", 0.02),
    ],
)
def test_it_learns_as_much(options: str, gap: float, uncompressed: tuple[float, float, float]) -> None:
    first, last, _ = spawn(train, 2, f"ps(servers=1, bucket_mb=0.004) {options}")[0]
    usual = uncompressed[0] - uncompressed[1]
    assert first - last >= (1 - gap) * usual, f"{first - last:.4f} learned, and {usual:.4f} uncompressed"


def test_two_servers_and_a_stale_clock() -> None:
    first, last, _ = spawn(train, 2, "ps(ssp=2) + topk(0.1)")[0]
    assert last < 0.9 * first


def sent(world: World, strategy: str) -> tuple[int, int]:
    """Bytes of gradients: what a worker sends in a step, and what they are.

    In the quietest of several: signs of life go out by time, and what is not answered soon is sent again.
    """
    parts = toy_parts(world, TOYS["stack"], strategy, precision="fp32")
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    try:
        found = min([take_step(parts, number).bytes_sent for number in range(6)][1:])
        return found, sum(bucket.nbytes for bucket in exchange.buckets)
    finally:
        exchange.close()


def test_fewer_bytes_leave() -> None:
    talk = None
    for options, part in (("", 1.0), ("+ bf16", 0.5), ("+ int8", 0.26), ("+ topk(0.05)", 0.11)):
        bytes_sent, whole = spawn(sent, 1, f"ps(servers=1) {options}")[0]
        talk = bytes_sent - whole if talk is None else talk
        signs_of_life = 600
        assert bytes_sent - talk <= part * whole + signs_of_life, f"{options}: {bytes_sent} of {whole}"


def test_nothing_of_a_dropped_step_is_sent_later() -> None:
    parts = toy_parts(World.alone(), TOYS["odd"], "ps(servers=1) + topk(0.1)", precision="fp32")
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    try:
        take_step(parts, 0)
        kept = [coded._feedback.residual for coded in exchange._outgoing._encodings.values()]  # type: ignore[union-attr]
        assert any(torch.any(residual != 0) for residual in kept)
        before = [residual.clone() for residual in kept]
        exchange.rescale(0.5)
        assert all(torch.equal(new, old / 2) for new, old in zip(kept, before, strict=True))
        exchange._outgoing.forget()
        assert not any(torch.any(residual != 0) for residual in kept)
    finally:
        exchange.close()


class Straight(nn.Module):
    """Its gradient is its input, whatever it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Parameter(torch.zeros(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.way


def plain_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def total(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum(), len(batch[0])


def go_straight(world: World, steps: int = 64) -> float:
    """By how much, squared, the way of some steps is off where every sample says the same."""
    same = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    order = RunConfig(
        model=Straight,
        loss=total,
        optimizer=plain_sgd,
        data=TensorDataset(same.repeat(8, 1)),  # type: ignore[arg-type]
        global_batch=4,
        strategy="ps(servers=1) + int4",
        seed=1,
    )
    parts = build(order, world, record="")[1]
    try:
        for number in range(steps):
            take_step(parts, number)
        return float((parts.whole.parameters()["way"] + steps * same).square().mean())
    finally:
        parts.exchange.close()


def test_workers_round_by_lots_of_their_own() -> None:
    """Rounded alike, the halves of two workers would be off by as much as one worker's whole."""
    alone, (first, second) = go_straight(World.alone()), spawn(go_straight, 2)
    assert first == second
    assert 0.4 < first / alone < 0.6
