"""A simulated job and its faults, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from shoal.server.steps import WorkTerms
from shoal.testing.network import Weather


@dataclass(frozen=True)
class Shape:
    """A job and its faults."""

    seed: int
    servers: int = 2
    replicas: int = 2
    workers: int = 2
    readers: int = 0
    """Processes that only look at values, over and over."""
    shards: int = 2
    steps: int = 4
    window: int = 0
    """0: parts together (bsp); above: so many steps ahead; -1: no bound."""
    then: int | None = None
    """The window from step `after` on, if it is another."""
    after: int = 0
    backup: int = 0
    """Where parts are together: so many of a step are not waited for."""
    patience: float = 60.0
    """Seconds that a worker may hold a part."""
    balance: float = 5.0
    """Seconds between two looks at how busy servers are; if short, that changes all the time."""
    server_kills: int = 1
    server_stops: int = 0
    server_parts: int = 0
    """Heads that get an update and cannot reach the next server of their chain; most end before they can again."""
    server_mutes: int = 0
    """Heads whose answers do not get to a worker, until their chain has a new server and they end."""
    coordinator_kills: int = 0
    view_kills: int = 0
    """Coordinators that end between two messages of one new view; at times a server ends with them."""
    worker_kills: int = 0
    worker_stops: int = 0
    worker_hangs: int = 0
    """Workers that compute for longer than the patience and give signs of life all the while."""
    weather: Weather = field(default_factory=Weather)

    @property
    def terms(self) -> WorkTerms:
        """What the workers agree on."""
        windows = [[0, self.window, int(self.window == 0)]]
        if self.then is not None:
            windows.append([self.after, self.then, int(self.then == 0)])
        return WorkTerms(self.workers, windows, self.backup)

    @property
    def holds_parts(self) -> bool:
        """Whether servers keep parts apart until they are told which of them count."""
        return self.backup > 0 or any(not together for _, _, together in self.terms.windows)


def shape_of(seed: int, server_kills: int = 1) -> Shape:
    """A job drawn by its seed: every clock, good and bad networks, all kinds of faults."""
    draw = random.Random(seed * 7919 + 1)
    workers, steps = draw.choice([2, 3]), draw.choice([3, 5])
    clock: dict[str, Any] = {"window": draw.choice([0, 0, 1, 2, -1])}
    if draw.random() < 0.3:
        clock |= {"then": draw.choice([0, 1, 2, -1]), "after": draw.randrange(1, steps)}
    if 0 in (clock["window"], clock.get("then")) and draw.random() < 0.4:
        clock["backup"] = draw.randrange(1, workers)
    hangs = draw.choice([0, 0, 0, 1])
    replicas = draw.choice([2, 2, 2, 3])
    return Shape(
        seed=seed,
        servers=replicas + draw.choice([0, 1]),
        replicas=replicas,
        balance=draw.choice([5.0, 5.0, 0.2]),
        workers=workers,
        readers=draw.choice([0, 0, 1]),
        shards=draw.choice([1, 2]),
        steps=steps,
        **clock,
        patience=0.8 if hangs else 60.0,
        server_kills=server_kills,
        server_stops=draw.choice([0, 0, 0, 1]),
        server_parts=draw.choice([0, 0, 1]),
        server_mutes=draw.choice([0, 0, 0, 1]),
        coordinator_kills=draw.choice([0, 0, 0, 1]),
        view_kills=draw.choice([0, 0, 1, 2]),
        worker_kills=draw.choice([0, 0, 1]),
        worker_stops=draw.choice([0, 0, 0, 1]),
        worker_hangs=hangs,
        weather=draw.choice([Weather(), Weather(0.03, 0.03, 0.02), Weather(0.03, 0.03, 0.02, 0.02)]),
    )
