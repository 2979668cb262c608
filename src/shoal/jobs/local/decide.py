"""The decision: which jobs start, stop or are dropped now. A pure function of the queue and the time.

Jobs stand in the order of priority, then of fair share, then of submission. They start in that order as long as they
fit, whole gangs or not at all. The first that does not fit is the head: it gets the earliest time at which it will
fit, and from then on nothing starts that would have to be gone by that time and is not (backfill by the rule of EASY).
A head that would fit in place of jobs of lower priority has those save, stop and wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from shoal.jobs.local.profile import Profile
from shoal.jobs.local.state import (
    STOP_ESTIMATE,
    Action,
    Amount,
    Drop,
    Queue,
    Reservation,
    Running,
    Start,
    Stop,
    Waiting,
)

MOST_TRIED = 1000
"""So many different shapes of jobs are tried behind the head; what is left waits for the next decision."""
_COUNTED = 3600.0
"""Seconds for which a job without a limit counts when shares are compared."""


def decide(queue: Queue, now: float) -> list[Action]:
    """What to do now.

    >>> wide = Waiting(1, 100, "me", 0.0, 4, 4, 1, 0, 0, seconds=60.0)
    >>> small = Waiting(2, 100, "me", 1.0, 1, 1, 1, 0, 0, seconds=60.0)
    >>> decide(Queue((4, 0, 0), (wide, small)), 2.0)
    [Start(job=1, workers=4, cards=())]
    """
    actions: list[Action] = [Stop(r.job.id, "time") for r in queue.running if _overdue(r, now)]
    able, dropped = _ready(queue, now)
    actions += dropped
    free = _FreeCards(queue)
    profile = _profile(queue, now)
    shares = [job for job in able if not job.reservation]
    for name in dict.fromkeys(job.reservation for job in able if job.reservation):
        mine = [job for job in able if job.reservation == name]
        actions += _start_reserved(queue, name, mine, now, free)
    actions += _start(queue, profile, ordered(shares, queue), now, free)
    return actions


def shadow(queue: Queue, now: float) -> tuple[int, float] | None:
    """The head of the queue and the time at which it can start; None where nothing has to wait."""
    profile = _profile(queue, now)
    for job in ordered(ready(queue, now), queue):
        if _widest(profile, job, now):
            profile.take(job.needs(_widest(profile, job, now)), now, now + job.lasts)
            continue
        at = profile.earliest(job.needs(job.least), job.lasts)
        if at is not None:
            return job.id, at
    return None


def ready(queue: Queue, now: float) -> list[Waiting]:
    """The jobs that wait for nothing but room, without those of reservations."""
    return [job for job in _ready(queue, now)[0] if not job.reservation]


def _overdue(running: Running, now: float) -> bool:
    limit = running.job.seconds
    return limit is not None and not running.asked and now >= running.started + limit


def _ready(queue: Queue, now: float) -> tuple[list[Waiting], list[Drop]]:
    """Those that may start as far as other jobs and reservations go, and those that never will."""
    windows = {reservation.name: reservation for reservation in queue.reservations}
    ends = dict(queue.ends)
    late = [job for job in queue.waiting if job.after or job.reservation]
    able = [job for job in queue.waiting if not (job.after or job.reservation)]
    dropped = []
    # Who waits for another is the younger of the two, so that one pass drops all that fall together.
    for job in sorted(late, key=attrgetter("id")):
        bad = next((i for i in job.after if ends.get(i) in ("failed", "cancelled")), None)
        if bad is not None:
            ended = "failed" if ends[bad] == "failed" else "been cancelled"
            dropped.append(Drop(job.id, f"job {bad}, after which it was to start, has {ended}"))
            ends[job.id] = "cancelled"
        elif job.reservation and (job.reservation not in windows or now >= windows[job.reservation].end):
            dropped.append(Drop(job.id, f"the reservation {job.reservation} is over"))
            ends[job.id] = "cancelled"
        elif all(ends.get(i) == "done" for i in job.after):
            able.append(job)
    return able, dropped


def _profile(queue: Queue, now: float) -> Profile:
    """What jobs without a reservation find free."""
    profile = Profile(queue.capacity, now)
    for running in queue.running:
        if not running.job.reservation:
            profile.take(running.amount, now, running.ends(now))
    for reservation in queue.reservations:
        if reservation.end > now:
            profile.take(reservation.amount, reservation.start, reservation.end)
    return profile


def can_reserve(queue: Queue, reservation: Reservation, now: float) -> bool:
    """Whether nothing that runs or is reserved may still hold what the reservation asks for."""
    others = tuple(other for other in queue.reservations if other.name != reservation.name)
    profile = _profile(replace(queue, reservations=others), now)
    return profile.fits(reservation.amount, reservation.start, reservation.end - reservation.start)


def ordered(jobs: Sequence[Waiting], queue: Queue) -> Iterator[Waiting]:
    """By priority; within one by turns of the accounts, whoever has used least first; within one by submission."""
    used = dict(queue.usage)
    # Running jobs count as if they had used their time: so a start does not change the order of the others.
    for running in queue.running:
        used[running.job.account] = used.get(running.job.account, 0.0) + _cost(running.job)
    levels: dict[int, dict[str, deque[Waiting]]] = {}
    for job in sorted(jobs, key=attrgetter("submitted", "id")):
        levels.setdefault(job.priority, {}).setdefault(job.account, deque()).append(job)
    for priority in sorted(levels, reverse=True):
        accounts = levels[priority]
        if len(accounts) == 1:
            yield from next(iter(accounts.values()))
            continue
        turns = [(used.get(name, 0.0), name) for name in accounts]
        heapq.heapify(turns)
        while turns:
            share, name = turns[0]
            job = accounts[name].popleft()
            yield job
            used[name] = share + _cost(job)
            if accounts[name]:
                heapq.heapreplace(turns, (used[name], name))
            else:
                heapq.heappop(turns)


def _cost(job: Waiting) -> float:
    return job.least * job.cores * (job.seconds or _COUNTED)


def _start(
    queue: Queue, profile: Profile, jobs: Iterable[Waiting], now: float, free: _FreeCards
) -> Iterator[Action]:
    """In order while they fit; behind the first that does not, what does not delay it."""
    head: Waiting | None = None
    refused = set[tuple[int, int, int, int, float]]()
    for job in jobs:
        if head is not None:
            cores, memory, _ = profile.now
            if cores <= 0 or len(refused) >= MOST_TRIED:
                return  # before the rest is even put in order
            if job.least * job.cores > cores or job.memory > memory:
                continue
        shape = (job.least, job.cores, job.memory, job.devices, job.lasts)
        if shape in refused:
            continue
        workers = _widest(profile, job, now)
        if workers:
            amount = job.needs(workers)
            profile.take(amount, now, now + job.lasts)
            yield Start(job.id, workers, free.take(amount[2]))
            continue
        refused.add(shape)
        if head is None:
            # Nobody waits for a job that can never fit.
            head = None if profile.earliest(job.needs(job.least), job.lasts) is None else job
            if head is not None:
                for victim in _victims(queue, job, profile, now):
                    yield Stop(victim.job.id, "preempt")
                    profile.give(victim.amount, now + STOP_ESTIMATE, victim.ends(now))
                at = profile.earliest(job.needs(job.least), job.lasts)
                assert at is not None
                profile.take(job.needs(job.least), at, at + job.lasts)


def _widest(profile: Profile, job: Waiting, now: float) -> int:
    """The most workers with which it fits from now on; 0: it does not."""
    cores, memory, devices = profile.now
    if job.least * job.cores > cores or job.memory > memory or job.least * job.devices > devices:
        return 0
    most = min(job.most, cores // job.cores)
    return next((n for n in range(most, job.least - 1, -1) if profile.fits(job.needs(n), now, job.lasts)), 0)


def _victims(queue: Queue, head: Waiting, profile: Profile, now: float) -> list[Running]:
    """The fewest of the jobs of lower priority in whose place the head fits, the lowest and youngest first."""
    need = head.needs(head.least)
    lower = [
        r
        for r in queue.running
        if r.job.preemptible and r.job.priority < head.priority and not r.asked and not r.job.reservation
    ]
    lower.sort(key=lambda r: (r.job.priority, -r.started, r.job.id))
    soon = now + STOP_ESTIMATE
    if not lower or profile.fits(need, soon, head.lasts):  # what stops or ends anyway is enough
        return []
    chosen: list[Running] = []
    for running in lower:
        chosen.append(running)
        profile.give(running.amount, soon, running.ends(now))
        if profile.fits(need, soon, head.lasts):
            break
    enough = profile.fits(need, soon, head.lasts)
    for running in list(chosen):  # one that came early may not be needed beside a larger one that came late
        profile.take(running.amount, soon, running.ends(now))
        if not enough:
            continue
        if profile.fits(need, soon, head.lasts):
            chosen.remove(running)
        else:
            profile.give(running.amount, soon, running.ends(now))
    for running in chosen if enough else []:
        profile.take(running.amount, soon, running.ends(now))
    return chosen if enough else []


def _start_reserved(
    queue: Queue, name: str, jobs: Sequence[Waiting], now: float, free: _FreeCards
) -> Iterator[Action]:
    """Jobs of a reservation: in order while they fit in what it has left, and are gone at its end."""
    window = next(r for r in queue.reservations if r.name == name)
    if not window.start <= now < window.end:
        return
    profile = Profile(window.amount, now)
    for running in queue.running:
        if running.job.reservation == name:
            profile.take(running.amount, now, running.ends(now))
    for job in ordered(jobs, queue):
        workers = _widest(profile, job, now) if now + job.lasts <= window.end else 0
        if workers:
            amount: Amount = job.needs(workers)
            profile.take(amount, now, now + job.lasts)
            yield Start(job.id, workers, free.take(amount[2]))


class _FreeCards:
    """Numbers of the devices that nobody has."""

    def __init__(self, queue: Queue) -> None:
        held = {card for running in queue.running for card in running.cards}
        self._free = [card for card in queue.cards if card not in held]

    def take(self, count: int) -> tuple[int, ...]:
        """So many of them."""
        taken = tuple(self._free[:count])
        del self._free[:count]
        return taken
