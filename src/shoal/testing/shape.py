"""A simulated job and its faults, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shoal.testing.network import Weather


@dataclass(frozen=True)
class Shape:
    """A job and its faults."""

    seed: int
    servers: int = 2
    replicas: int = 2
    workers: int = 2
    shards: int = 2
    steps: int = 4
    window: int = 0
    """0: parts together (bsp); above: so many steps ahead; -1: no bound."""
    server_kills: int = 1
    server_stops: int = 0
    coordinator_kills: int = 0
    worker_kills: int = 0
    weather: Weather = field(default_factory=Weather)

    @property
    def together(self) -> bool:
        return self.window == 0


def shape_of(seed: int, server_kills: int = 1) -> Shape:
    """A job drawn by its seed: every clock, good and bad networks, all kinds of faults."""
    draw = random.Random(seed * 7919 + 1)
    bad = draw.random() < 0.5
    return Shape(
        seed=seed,
        servers=draw.choice([2, 3]),
        replicas=2,
        workers=draw.choice([2, 3]),
        shards=draw.choice([1, 2]),
        steps=draw.choice([3, 5]),
        window=draw.choice([0, 1, 2, -1]),
        server_kills=server_kills,
        server_stops=draw.choice([0, 0, 0, 1]),
        coordinator_kills=draw.choice([0, 0, 1]),
        worker_kills=draw.choice([0, 0, 1]),
        weather=Weather(0.03, 0.03, 0.02) if bad else Weather(),
    )
