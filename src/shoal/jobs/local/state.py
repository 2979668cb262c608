"""The queue of one host as plain values: what the decision reads, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Amount = tuple[int, int, int]
"""Cores, bytes of memory, devices."""
NOTHING: Amount = (0, 0, 0)

TIME_GRACE = 30.0
"""After its time a job is asked to save and stop; so long later it is killed. Plans count with it."""
STOP_ESTIMATE = 60.0
"""How long a job that was asked to stop is expected to take. A guess: it saves first."""
HORIZON = 10 * 365 * 86400.0
"""When a job without a time limit is expected to end."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that has not started, or has to start again."""

    id: int
    priority: int
    account: str
    submitted: float
    least: int
    most: int
    cores: int
    memory: int
    devices: int
    seconds: float | None = None
    preemptible: bool = True
    reservation: str = ""
    after: tuple[int, ...] = ()

    def needs(self, workers: int) -> Amount:
        """What it takes with so many workers. Memory is that of the whole job."""
        return workers * self.cores, self.memory, workers * self.devices

    @property
    def lasts(self) -> float:
        """How long it may hold its resources. One without a limit outlasts whatever runs now."""
        return 2 * HORIZON if self.seconds is None else self.seconds + TIME_GRACE


@dataclass(frozen=True, slots=True)
class Running:
    """A job that holds its resources."""

    job: Waiting
    workers: int
    started: float
    asked: str = ""
    """What it was asked to stop for: "", "preempt", "cancel" or "time"."""
    asked_at: float = 0.0
    cards: tuple[int, ...] = ()
    """Which devices it has."""

    @property
    def amount(self) -> Amount:
        return self.job.needs(self.workers)

    def ends(self, now: float) -> float:
        """When its resources are expected back."""
        if self.asked:
            grace = TIME_GRACE if self.asked == "time" else STOP_ESTIMATE
            return max(self.asked_at + grace, now + 1.0)
        if self.job.seconds is None:
            return now + HORIZON
        return max(self.started + self.job.lasts, now + 1.0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources that only jobs which name it may use, from one time to another."""

    name: str
    amount: Amount
    start: float
    end: float


@dataclass(frozen=True)
class Queue:
    """All that the decision looks at."""

    capacity: Amount
    waiting: tuple[Waiting, ...] = ()
    running: tuple[Running, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)
    """Core-seconds of late by account."""
    reservations: tuple[Reservation, ...] = ()
    ends: Mapping[int, str] = field(default_factory=dict)
    """How jobs that others wait for have ended."""
    cards: tuple[int, ...] = ()
    """Numbers of the devices."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a job, with all of its workers at once."""

    job: int
    workers: int
    cards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask a running job to save and end: for its time, or for a job of higher priority."""

    job: int
    why: str
    """ "time" or "preempt"."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A job that can never start."""

    job: int
    why: str


Action = Start | Stop | Drop
