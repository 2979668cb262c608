"""`abort` and `reopen` of every exchange: a step that is cut short anywhere is done again, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shoal.errors import PeerLost
from shoal.exchange import TABLE
from shoal.server.client.connection import Link
from shoal.testing.parity import toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.world.shm.backend import SharedMemoryGroup
from shoal.world.world import World

STEPS = 4
CUT = 2
"""The step that is cut short."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
STRATEGIES = {
    "solo": "solo",
    "ddp": "ddp(bucket_mb=0.002)",
    "zero1": "zero1(bucket_mb=0.002)",
    "zero2": "zero2(bucket_mb=0.002)",
    "zero3": "zero3",
    "shared": "shared(bucket_mb=0.002)",
    "local": "local(3)",
    "diloco": "diloco(1)",
}
"""By their names in the table. `ps` runs no collective: its workers leave and join the servers, in another test."""


class Cut:
    """Counts collectives from a moment on, and says at one of them that a peer is gone."""

    def __init__(self) -> None:
        self.count = -1
        self.at = -1

    def call(self, real: Callable[..., object], *args: object) -> object:
        if self.count >= 0:
            self.count += 1
            if self.count == self.at:
                raise PeerLost("a peer is gone")
        return real(*args)


@contextmanager
def counted() -> Iterator[Cut]:
    cut = Cut()
    kinds = [*((World, name) for name in COLLECTIVES), (SharedMemoryGroup, "reduce_parts")]
    real = [(kind, name, getattr(kind, name)) for kind, name in kinds]
    for kind, name, method in real:

        def wrapped(*args: object, method: Callable[..., object] = method) -> object:
            return cut.call(method, *args)

        setattr(kind, name, wrapped)
    try:
        yield cut
    finally:
        for kind, name, method in real:
            setattr(kind, name, method)


def train(world: World, strategy: str, at: int) -> tuple[dict[str, torch.Tensor], int]:
    """Train a toy; cut its third step short at collective number `at`. Parameters, and how many collectives it has."""
    parts = toy_parts(world.new_group(), TOYS["unused"], strategy, deterministic=True)
    if not parts.gather.refusal:
        parts.loss = gathering(parts)
    found = -1
    with counted() as cut:
        done = 0
        while done < STEPS:
            if done == CUT and found < 0:
                cut.count = 0
                cut.at = at
            try:
                done = step(parts, done)
            except PeerLost:
                cut.at = -1
                parts.abort()
                under_way = [p for p in parts.model.parameters() if p.grad is not None]
                assert not under_way, "gradients are left behind"
                applied = getattr(parts.exchange, "_applied", False)
                parts.reopen(world.new_group(), World.alone())
                done += int(applied)
            if cut.count >= 0:
                found = max(found, cut.count)
                cut.count = -1
    parts.exchange.work.final_sync()
    return parts.exchange.parameters(), found


def gathering(parts: StepContext) -> Callable[..., Any]:
    """The loss, with a term that sees the rows of all workers."""
    given = parts.loss

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, Any]:
        total, count = given(output, batch)
        return total + 0.01 * parts.gather(output).square().mean() * count, count

    return loss


def step(parts: StepContext, done: int) -> int:
    view = parts.exchange.work.next(done, STEPS)
    assert view is not None
    return run_step(parts, view).number


def compare(world: World, strategy: str) -> list[str]:
    wanted, count = train(world, strategy, -1)
    problems = []
    for at in range(1, count + 1):
        found, _ = train(world, strategy, at)
        problems += [
            f"cut at {at} of {count}: {name}" for name in wanted if not torch.equal(wanted[name], found[name])
        ]
    assert count > 0 or strategy == "solo"
    return problems


def leave_and_join(world: World) -> list[str]:
    """Rank 0 is cut short at every third word with the servers, leaves them and joins again; rank 1 goes on."""
    problems: list[str] = []
    wanted, count = talk(world, -1)
    for at in range(1, int(world.gather_numbers([count])[0, 0]) + 1, 3):
        found, _ = talk(world, at)
        problems += [f"cut at {at} of {count}: {n}" for n in wanted if not torch.equal(wanted[n], found[n])]
    return problems


def talk(world: World, at: int) -> tuple[dict[str, torch.Tensor], int]:
    parts = toy_parts(world, TOYS["unused"], "ps(bucket_mb=0.002)", deterministic=True)
    cut, done = Cut(), 0
    cut.at = at if world.rank == 0 else -1
    real = {name: getattr(Link, name) for name in ("run", "wait")}
    for name, method in real.items():
        setattr(Link, name, lambda *args, method=method: cut.call(method, *args))
    try:
        while True:
            try:
                view = parts.exchange.work.next(done, STEPS)
                if view is None:
                    break
                cut.count = max(cut.count, 0)
                done = run_step(parts, view).number
            except PeerLost:
                cut.at = -1
                parts.exchange.abort()
                parts.exchange.reopen(world, World.alone())
    finally:
        for name, method in real.items():
            setattr(Link, name, method)
    found = parts.exchange.parameters()
    world.barrier()
    parts.exchange.close()
    return found, cut.count


def test_a_worker_leaves_the_servers_anywhere_and_joins_again_to_the_same_bits() -> None:
    for problems in spawn(leave_and_join, 2):
        assert not problems


def test_every_exchange_is_here() -> None:
    assert {*STRATEGIES, "ps"} == set(TABLE)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "solo"])
def test_a_step_that_is_cut_short_anywhere_is_done_again_to_the_same_bits(name: str) -> None:
    for problems in spawn(compare, 2, STRATEGIES[name]):
        assert not problems
