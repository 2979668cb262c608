"""The decision of the local queue: examples of each rule, and seeded simulations of whole queues with faults."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.jobs.local.decide import can_reserve, decide, ordered, ready, shadow
from shoal.jobs.local.profile import Profile
from shoal.jobs.local.state import (
    STOP_ESTIMATE,
    TIME_GRACE,
    Amount,
    Drop,
    Queue,
    Reservation,
    Running,
    Start,
    Stop,
    Waiting,
)


def job(id: int, workers: int = 1, **more: Any) -> Waiting:
    fields: dict[str, Any] = {
        "priority": 100,
        "account": "me",
        "submitted": float(id),
        "least": workers,
        "most": workers,
        "cores": 1,
        "memory": 0,
        "devices": 0,
        "seconds": 100.0,
    }
    return Waiting(id, **{**fields, **more})


def running(id: int, workers: int, started: float = 0.0, **more: Any) -> Running:
    return Running(job(id, workers, **more), workers, started)


def starts(queue: Queue, now: float = 1000.0) -> list[int]:
    return [action.job for action in decide(queue, now) if isinstance(action, Start)]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    queue = Queue((4, 0, 0), (job(1, 3),), (running(9, 2, 990.0),))
    assert starts(queue) == []
    assert decide(replace(queue, running=()), 1000.0) == [Start(1, 3)]


def test_a_range_takes_what_fits_and_never_less_than_the_least() -> None:
    ranged = job(1, least=2, most=4)
    assert decide(Queue((8, 0, 0), (ranged,)), 0.0) == [Start(1, 4)]
    assert decide(Queue((3, 0, 0), (ranged,)), 0.0) == [Start(1, 3)]
    assert decide(Queue((1, 0, 0), (ranged,)), 0.0) == []


def test_memory_and_devices_count_as_cores_do() -> None:
    assert starts(Queue((8, 10, 0), (job(1, memory=6), job(2, memory=6)))) == [1]
    queue = Queue((8, 0, 3), (job(1, 2, devices=1), job(2, 2, devices=1)), cards=(4, 5, 7))
    assert decide(queue, 0.0) == [Start(1, 2, (4, 5))]


def test_priority_goes_before_time_of_submission() -> None:
    assert starts(Queue((1, 0, 0), (job(1), job(2, priority=200)))) == [2]


def test_backfill_takes_what_is_gone_before_the_head_starts_or_does_not_need_its_cores() -> None:
    """Two cores are free for 60 s, then the head takes three of four."""
    busy = running(9, 2, 1000.0 - 70.0)  # 100 s and the grace: gone in 60 s
    head = job(1, 3)
    short, long, beside = job(2, seconds=20.0), job(3, seconds=500.0), job(4, seconds=500.0)
    assert starts(Queue((4, 0, 0), (head, short), (busy,))) == [2]
    assert starts(Queue((4, 0, 0), (head, long, beside), (busy,))) == [3], "one core is the head's to leave"


def test_a_job_without_a_limit_does_not_slip_past_the_head() -> None:
    busy = running(9, 2, seconds=None)
    assert starts(Queue((3, 0, 0), (job(1, 3), job(2, seconds=None)), (busy,))) == []
    assert starts(Queue((3, 0, 0), (job(1, 3), job(2, seconds=50.0)), (busy,))) == [2]


def test_a_job_that_can_never_fit_holds_up_nobody() -> None:
    assert starts(Queue((2, 0, 0), (job(1, 3), job(2, 2)))) == [2]


def test_a_higher_priority_has_the_fewest_lower_ones_make_way_lowest_and_youngest_first() -> None:
    old, young = running(7, 2, 100.0), running(8, 2, 900.0)
    kept = replace(running(6, 2, 950.0), job=job(6, 2, preemptible=False))
    queue = Queue((6, 0, 0), (job(1, 2, priority=200),), (old, young, kept))
    fresh = replace(queue, running=(*(replace(r, started=990.0 + r.job.id) for r in (old, young)), kept))
    assert [a for a in decide(fresh, 1000.0) if isinstance(a, Stop)] == [Stop(8, "preempt")]
    asked = tuple(replace(r, asked="preempt", asked_at=999.0) if r.job.id == 8 else r for r in fresh.running)
    assert decide(replace(fresh, running=asked), 1000.0) == [], "one that stops already is enough"


def test_equal_priorities_do_not_preempt() -> None:
    assert decide(Queue((2, 0, 0), (job(1, 2),), (running(9, 2, 990.0),)), 1000.0) == []


def test_accounts_take_turns_and_who_has_used_less_goes_first() -> None:
    jobs = (job(1, account="a"), job(2, account="a"), job(3, account="b"), job(4, account="b"))
    assert starts(Queue((2, 0, 0), jobs)) == [1, 3]
    assert starts(Queue((2, 0, 0), jobs, usage={"a": 1e6})) == [3, 4]


def test_dependencies_wait_for_a_good_end_and_fall_with_a_bad_one() -> None:
    after = job(2, after=(1,))
    assert starts(Queue((2, 0, 0), (after,), ends={1: "running"})) == []
    assert starts(Queue((2, 0, 0), (after,), ends={1: "done"})) == [2]
    assert isinstance(decide(Queue((2, 0, 0), (after,), ends={1: "failed"}), 0.0)[0], Drop)


def test_what_is_reserved_is_kept_free_and_used_by_those_who_name_it() -> None:
    window = Reservation("class", (2, 0, 0), 1050.0, 1500.0)
    queue = Queue((3, 0, 0), (job(1, 2, seconds=100.0), job(2, 2, seconds=10.0)), reservations=(window,))
    assert starts(queue) == [2], "the first would still run when the class begins"
    named = job(3, 2, seconds=100.0, reservation="class")
    assert starts(replace(queue, waiting=(named,))) == []
    assert starts(replace(queue, waiting=(named,)), 1100.0) == [3]
    assert starts(replace(queue, waiting=(named,)), 1450.0) == [], "it would outlast the reservation"
    assert isinstance(decide(replace(queue, waiting=(named,)), 1500.0)[0], Drop)


def test_a_reservation_does_not_take_what_may_still_be_held() -> None:
    queue = Queue((2, 0, 0), running=(running(1, 2, 1000.0),))
    assert not can_reserve(queue, Reservation("r", (1, 0, 0), 1100.0, 1200.0), 1000.0)
    assert can_reserve(queue, Reservation("r", (1, 0, 0), 1100.0 + TIME_GRACE, 1200.0), 1000.0)


def test_a_job_over_its_time_is_stopped_once() -> None:
    over = running(1, 1, 0.0)
    assert decide(Queue((1, 0, 0), running=(over,)), 100.0) == [Stop(1, "time")]
    assert decide(Queue((1, 0, 0), running=(replace(over, asked="time"),)), 101.0) == []


# Whole queues: arrivals, ends, overruns, losses, cancels and preemptions, drawn from a seed.


@dataclass
class Simulation:
    """A host, its queue, and a clock that jumps from one event to the next."""

    seed: int
    now: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    promise: tuple[int, float] | None = None
    attempts: int = 0
    events: list[tuple[float, int, str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.capacity: Amount = (
            self.draw.choice([2, 4, 8]),
            self.draw.choice([8, 16]),
            self.draw.choice([0, 2]),
        )
        self.jobs = [self.job(i + 1) for i in range(self.draw.randint(5, 40))]
        for each in self.jobs:
            self.at(each.submitted, "arrive", each.id)
        if self.draw.random() < 0.5:
            start = self.draw.uniform(100, 600)
            amount = (self.draw.randint(1, self.capacity[0]), 4, 0)
            self.wanted = Reservation("r", amount, start, start + 400.0)
            self.at(0.0, "reserve", 0)

    def job(self, id: int) -> Waiting:
        draw = self.draw
        least = draw.randint(1, self.capacity[0])
        limited = draw.random() < 0.9
        return job(
            id,
            least=least,
            most=min(self.capacity[0], least + draw.choice([0, 0, 1, 4])),
            priority=draw.choice([0, 100, 100, 200]),
            account=draw.choice("abc"),
            submitted=draw.choice([0.0, draw.uniform(0, 500)]),
            memory=draw.randint(0, self.capacity[1]),
            devices=int(draw.random() < 0.2 and least <= self.capacity[2]),
            seconds=draw.choice([10.0, 100.0, draw.uniform(5, 200)]) if limited else None,
            preemptible=draw.random() < 0.8,
            after=(draw.randint(1, id - 1),) if id > 1 and draw.random() < 0.15 else (),
        )

    def at(self, time: float, what: str, id: int, attempt: int = 0) -> None:
        heapq.heappush(self.events, (time, len(self.events) + self.attempts * 1000, what, id, attempt))

    def queue(self) -> Queue:
        cards = tuple(range(self.capacity[2]))
        ends = {each.id: self.ends.get(each.id, "waiting") for each in self.jobs}
        waiting, runs = tuple(self.waiting.values()), tuple(self.running.values())
        return Queue(self.capacity, waiting, runs, {}, self.reservations, ends, cards)

    def run(self) -> None:
        while self.events:
            self.now, _, what, id, attempt = heapq.heappop(self.events)
            self.happen(what, id, attempt)
            self.decide()
        assert set(self.ends) == {each.id for each in self.jobs}, "a job is lost"
        assert not self.running
        assert not self.waiting

    def happen(self, what: str, id: int, attempt: int) -> None:
        if what == "arrive":
            self.waiting[id] = self.jobs[id - 1]
            self.promise = None
        elif what == "reserve":
            if can_reserve(self.queue(), self.wanted, self.now):
                self.reservations = (self.wanted,)
            self.promise = None
        elif what == "look" or self.attempts_of.get(id) != attempt or id not in self.running:
            pass
        elif what == "end":
            self.release(id, "done")
        elif what == "lose":
            self.lost[id] = self.lost.get(id, 0) + 1
            self.release(id, "waiting")
        elif what == "cancel":
            self.release(id, "cancelled")
        elif what == "stopped":
            self.release(id, "failed" if self.running[id].asked == "time" else "waiting")

    @property
    def attempts_of(self) -> dict[int, int]:
        return self.started

    def release(self, id: int, state: str) -> None:
        ended = self.running.pop(id)
        if state == "waiting":
            self.waiting[id] = ended.job
            self.promise = None  # its old place in the queue may be before the head
        else:
            self.ends[id] = state

    def decide(self) -> None:
        before = self.queue()
        head = shadow(before, self.now)
        if self.promise is not None and self.first() != self.promise[0]:
            self.promise = (
                None  # another comes before it now: a new one, a turn of its account, a dependency's end
            )
        for action in decide(before, self.now):
            self.apply(action)
        self.check()
        after = shadow(self.queue(), self.now)
        stops = any(r.asked == "preempt" for r in self.running.values())
        if head is not None and head[0] in self.waiting:
            assert after is not None
            if self.first() == head[0] and not stops:
                assert after[1] <= head[1] + 1e-6, f"seed {self.seed}: job {head[0]} is delayed by backfill"
        if self.promise is not None and not stops:
            id, time = self.promise
            assert id not in self.waiting or self.now <= time + 1e-6, (
                f"seed {self.seed}: the head waits too long"
            )
        if after is None or self.promise is None or self.promise[0] != after[0] or after[1] < self.promise[1]:
            self.promise = after
        limits = [r.started + r.job.seconds for r in self.running.values() if r.job.seconds and not r.asked]
        edges = [t for each in self.reservations for t in (each.start, each.end)]
        for time in (t for t in (*limits, *edges, *([after[1]] if after else [])) if self.now < t < 1e7):
            if not any(event[0] == time and event[2] == "look" for event in self.events):
                self.at(time, "look", 0)

    def first(self) -> int:
        """The job whose turn it is; 0: there is none."""
        return next((each.id for each in ordered(ready(self.queue(), self.now), self.queue())), 0)

    def apply(self, action: Start | Stop | Drop) -> None:
        if isinstance(action, Drop):
            assert self.waiting.pop(action.job)
            self.ends[action.job] = "cancelled"
        elif isinstance(action, Stop):
            asked = self.running[action.job]
            assert not asked.asked
            self.running[action.job] = replace(asked, asked=action.why, asked_at=self.now)
            most = TIME_GRACE if action.why == "time" else STOP_ESTIMATE
            self.at(self.now + self.draw.uniform(0, most), "stopped", action.job, self.started[action.job])
        else:
            wanted = self.waiting.pop(action.job)  # KeyError: it was started twice
            assert wanted.least <= action.workers <= wanted.most, "a gang is partial"
            assert len(action.cards) == action.workers * wanted.devices
            self.attempts += 1
            self.started[wanted.id] = self.attempts
            self.running[wanted.id] = Running(wanted, action.workers, self.now, cards=action.cards)
            self.plan_end(wanted)

    def plan_end(self, wanted: Waiting) -> None:
        draw, attempt = self.draw, self.started[wanted.id]
        lasts = draw.uniform(0, 1.2) * (wanted.seconds or 100.0)
        if draw.random() < 0.15 and self.lost.get(wanted.id, 0) < 4:
            self.at(self.now + draw.uniform(0, lasts), "lose", wanted.id, attempt)
        elif draw.random() < 0.05:
            self.at(self.now + draw.uniform(0, lasts), "cancel", wanted.id, attempt)
        self.at(self.now + lasts, "end", wanted.id, attempt)

    def check(self) -> None:
        held = [sum(r.amount[i] for r in self.running.values()) for i in range(3)]
        cards = [card for r in self.running.values() for card in r.cards]
        assert len(cards) == len(set(cards)), "two jobs share a card"
        for place in range(3):
            kept = sum(r.amount[place] for r in self.reservations if r.start <= self.now < r.end)
            assert held[place] + kept <= self.capacity[place], (
                f"seed {self.seed}: more than there is at {self.now}"
            )


@pytest.mark.parametrize(
    "seeds",
    [range(60), *(pytest.param(range(n, n + 94), marks=pytest.mark.all_only) for n in range(60, 1000, 94))],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_simulated_queues(seeds: range) -> None:
    attempts = 0
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run()
        attempts += simulation.attempts
    assert attempts > 10 * len(seeds)


def makespan(jobs: list[Waiting], capacity: Amount) -> float:
    """When the last of them ends, if they all end at their limit."""
    now, waiting, active, last = 0.0, {each.id: each for each in jobs}, {}, 0.0
    while waiting or active:
        queue = Queue(capacity, tuple(waiting.values()), tuple(active.values()))
        for action in decide(queue, now):
            if isinstance(action, Stop):
                continue  # it is at its limit, and ends with the grace that plans count with
            wanted = waiting.pop(action.job)
            active[wanted.id] = Running(wanted, action.workers, now)
        now = min(each.started + each.job.lasts for each in active.values())
        active = {id: each for id, each in active.items() if each.started + each.job.lasts > now}
        last = now
    return last


def best(jobs: list[Waiting], capacity: Amount) -> float:
    """Of all orders, each job as early as it fits: among these schedules is an optimal one."""
    return min(_in_order(order, capacity) for order in itertools.permutations(jobs))


def _in_order(jobs: tuple[Waiting, ...], capacity: Amount) -> float:
    profile, last = Profile(capacity, 0.0), 0.0
    for each in jobs:
        start = profile.earliest(each.needs(each.least), each.lasts)
        assert start is not None
        profile.take(each.needs(each.least), start, start + each.lasts)
        last = max(last, start + each.lasts)
    return last


def ratios(cases: int, size: int = 5) -> list[float]:
    found = []
    for seed in range(cases):
        draw = random.Random(seed)
        jobs = [
            job(i + 1, draw.randint(1, 4), seconds=draw.uniform(50, 1000), submitted=0.0) for i in range(size)
        ]
        found.append(makespan(jobs, (4, 0, 0)) / best(jobs, (4, 0, 0)))
    return found


def test_makespan_is_near_the_optimum() -> None:
    found = ratios(40)
    assert statistics.mean(found) <= 1.1
    assert min(found) >= 1.0 - 1e-9
