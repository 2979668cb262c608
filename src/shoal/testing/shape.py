"""A simulated job and its faults, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property

from shoal.clock import make_clocks
from shoal.server.protocol.work_terms import WorkTerms
from shoal.testing.network import Weather

CLOCKS = ("bsp", "ssp(1)", "ssp(2)", "asp", "dssp(1, 3)")


@dataclass(frozen=True)
class JobShape:
    """A job and its faults."""

    seed: int
    servers: int = 2
    replicas: int = 2
    workers: int = 2
    readers: int = 0
    """Processes that only look at values, over and over."""
    shards: int = 2
    steps: int = 4
    clock: str = "bsp"
    then: str = ""
    """The clock from step `after` on, if it is another."""
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

    @cached_property
    def terms(self) -> WorkTerms:
        """What the workers agree on."""
        return WorkTerms(self.workers, make_clocks(self.clock, None, self.then, self.after), self.backup)

    @property
    def holds_parts(self) -> bool:
        """Whether servers keep parts one by one until it is known which of them count."""
        return self.backup > 0 or not self.terms.together


def shape_of(seed: int, server_kills: int = 1) -> JobShape:
    """A job drawn by its seed: every clock, good and bad networks, all kinds of faults."""
    draw = random.Random(seed * 7919 + 1)
    workers = draw.choice([2, 3])
    steps = draw.choice([3, 5])
    clock = draw.choice(["bsp", *CLOCKS])
    two = draw.random() < 0.4
    then = draw.choice(CLOCKS) if two else ""
    after = draw.randrange(1, steps) if two else 0
    backup = draw.randrange(1, workers) if "bsp" in (clock, then) and draw.random() < 0.5 else 0
    hangs = draw.choice([0, 0, 0, 1])
    replicas = draw.choice([2, 2, 2, 3])
    return JobShape(
        seed=seed,
        servers=replicas + draw.choice([0, 1]),
        replicas=replicas,
        balance=draw.choice([5.0, 5.0, 0.2]),
        workers=workers,
        readers=draw.choice([0, 0, 1]),
        shards=draw.choice([1, 2]),
        steps=steps,
        clock=clock,
        then=then,
        after=after,
        backup=backup,
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
