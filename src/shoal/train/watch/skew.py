"""How far the wall clocks of a job's hosts are apart. Nothing is decided by it: logs are laid side by side with it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from shoal.world.hosts import group_ranks
from shoal.world.world import World

QUESTIONS = 8


@dataclass(frozen=True)
class HostClock:
    """The clock of one host: add `offset` seconds to its times to get those of the first host."""

    rank: int
    """The first on that host."""
    offset: float
    error: float
    """Half of the fastest round trip: `offset` cannot be further off."""


def compare_clocks(world: World) -> list[HostClock]:
    """The clocks of all hosts but the first, on every rank. Collective.

    The first rank of each host asks rank 0 for the time, several times: the fastest answer knows best.
    """
    leaders = [ranks[0] for ranks in group_ranks(world.hosts)]
    mine = [0.0, 0.0]
    for leader in leaders[1:]:
        if world.rank == 0:
            _answer(world, leader)
        elif world.rank == leader:
            mine = _ask(world)
    rows = world.gather_numbers(mine).tolist()
    return [HostClock(leader, *rows[leader]) for leader in leaders[1:]]


def _answer(world: World, leader: int) -> None:
    number = torch.zeros(1, dtype=torch.float64, device=world.device)
    for _ in range(QUESTIONS):
        world.receive(number, leader).wait()
        number.fill_(time.time())
        world.send(number, leader).wait()


def _ask(world: World) -> list[float]:
    """Offset and error."""
    number = torch.zeros(1, dtype=torch.float64, device=world.device)
    best = [0.0, float("inf")]
    for _ in range(QUESTIONS):
        before, clock = time.monotonic(), time.time()
        world.send(number, 0).wait()
        world.receive(number, 0).wait()
        trip = time.monotonic() - before
        if trip / 2 < best[1]:
            best = [float(number) - (clock + trip / 2), trip / 2]
    return best
