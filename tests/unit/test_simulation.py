"""Whole parameter-server jobs on a simulated network, with faults by seed: nothing acknowledged is lost, nothing is
applied twice, nobody is further ahead than the clock allows, and all reads fit one order of events."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from shoal.errors import ServerRefused
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.node import Node
from shoal.server.protocol.view import View
from shoal.server.replication.chain import Chain
from shoal.testing.history import JobHistory, Read, WriteEvent, check_linearised
from shoal.testing.network import Weather
from shoal.testing.scenario import SimulatedJob, check
from shoal.testing.shape import CLOCKS, JobShape, shape_of

SEEDS = 420
"""benchmarks/server/simulation.py runs ten thousand."""
GROUPS = 6


def run(shape: JobShape) -> SimulatedJob:
    job = SimulatedJob(shape)
    job.run()
    check(job)
    return job


@pytest.mark.parametrize("group", range(GROUPS))
def test_seeded_faults(group: int) -> None:
    histories = [run(shape_of(seed)).history for seed in range(group, SEEDS, GROUPS)]
    assert sum(history.kills for history in histories) > len(histories) // 2, "most should have lost a server"
    assert sum(history.cuts for history in histories) > len(histories) // 4, "and many a coordinator"


def test_seeds_draw_every_clock_and_every_fault() -> None:
    shapes = [shape_of(seed) for seed in range(SEEDS)]
    clocks = {(shape.clock, shape.then, shape.backup > 0) for shape in shapes}
    for clock, then in product(CLOCKS, ["", *CLOCKS]):
        assert (clock, then, False) in clocks
        assert ((clock, then, True) in clocks) == ("bsp" in (clock, then)), (
            "backup is for parts that go together"
        )
    for fault in fields(JobShape):
        if fault.name.partition("_")[2] in ("kills", "stops", "parts", "mutes", "hangs"):
            assert any(getattr(shape, fault.name) for shape in shapes), fault.name


@pytest.mark.parametrize("clock", ["bsp", "ssp(1)", "ssp(3)", "asp", "dssp(0, 2)"])
def test_many_kills_in_one_job(clock: str) -> None:
    shape = JobShape(seed=5, servers=3, workers=3, steps=120, clock=clock, server_kills=6)
    history = run(shape).history
    assert history.kills >= 3
    assert history.finished == 3


@pytest.mark.parametrize("backup", [1, 2])
def test_parts_that_are_left_out_are_never_applied(backup: int) -> None:
    history = run(JobShape(seed=2, workers=3, steps=40, backup=backup, server_kills=2)).history
    named = {(step, part) for step, parts in history.updates for part in parts}
    assert set(history.computed) - named, "nobody came too late"
    assert len(named) == 40 * (3 - backup)


@pytest.mark.parametrize(
    ("clock", "then"),
    [
        ("bsp", "ssp(1)"),
        ("bsp", "asp"),
        ("ssp(2)", "bsp"),
        ("asp", "bsp"),
        ("asp", "ssp(1)"),
        ("ssp(1)", "ssp(2)"),
        ("dssp(1, 3)", "bsp"),
        ("bsp", "dssp(1, 3)"),
    ],
)
def test_clocks_that_change_in_the_middle(clock: str, then: str) -> None:
    shape = JobShape(seed=3, workers=3, steps=40, clock=clock, then=then, after=20, server_kills=2)
    history = run(shape).history
    for holds, steps in ((clock, range(20)), (then, range(20, 40))):
        ahead = max(step - oldest for step, oldest in history.claims if step in steps)
        assert (ahead > 0) == (holds != "bsp"), "claims are not by the clock of their step"


@pytest.mark.parametrize("clock", ["bsp", "ssp(1)"])
def test_a_part_that_is_held_for_too_long_is_done_by_others(clock: str) -> None:
    shape = JobShape(seed=4, workers=3, steps=6, clock=clock, patience=0.5, server_kills=0)
    job = SimulatedJob(shape)
    job.workers[1].hang = 8.0
    job.network.run(6.0)
    assert job.history.finished == 2, "the others should have gone on to the end"
    job.run()
    check(job)
    assert len(job.history.computed) > len(set(job.history.computed)), "nobody else has done it"


def test_a_worker_that_is_stopped_with_a_part_does_no_harm_when_it_goes_on() -> None:
    twice, clocks = 0, ("asp", "bsp", "ssp(1)")
    for seed in range(20):
        job = run(
            JobShape(seed=seed, workers=3, steps=4, clock=clocks[seed % 3], worker_stops=2, server_kills=0)
        )
        twice += len(job.history.computed) - len(set(job.history.computed))
    assert twice > 0, "all of them had nothing in hand"


def test_coordinators_that_end_between_two_messages_of_a_view() -> None:
    cuts = 0
    for seed in range(40):
        shape = replace(shape_of(seed), servers=2 + seed % 2, replicas=2, view_kills=3, server_stops=1)
        cuts += run(shape).history.cuts
    assert cuts > 60


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = run(shape_of(17)), run(shape_of(17))
    assert (one.network.messages, one.network.now) == (other.network.messages, other.network.now)
    assert one.history == other.history


def test_a_busy_server_gives_a_shard_away() -> None:
    shape = JobShape(seed=1, servers=3, workers=2, shards=4, steps=40, server_kills=0)
    job = SimulatedJob(shape)
    job.network.run(1.6)  # loads of its own come before that
    assert job.coordinator is not None
    before = job.coordinator.view
    busiest = max(before.addresses, key=lambda s: sum(s in chain for chain in before.chains[1:]))
    for node in job.nodes.values():
        node.load = lambda busy=float(node.me == busiest): {"busy": busy}
    job.run()
    job.network.run(12.0)  # one copy more, then one less, with some seconds between them
    check(job)
    after = job.coordinator.view
    held = [sum(busiest in chain for chain in view.chains[1:]) for view in (before, after)]
    assert held[1] < held[0], "no shard has moved"


def test_workers_lost_and_stopped_servers_together() -> None:
    for seed in range(20):
        weather = Weather(0.05, 0.05, 0.03)
        shape = replace(shape_of(seed), worker_kills=2, server_stops=1, coordinator_kills=1, weather=weather)
        run(shape)


# The checks can fail: each mechanism is taken out, and somebody notices.


def some_fail(seeds: range) -> bool:
    for seed in seeds:
        try:
            run(shape_of(seed))
        except (AssertionError, ServerRefused):
            return True
    return False


def test_answers_before_all_hold_an_operation_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Chain._take

    def hasty(self: Chain, message: object, now: float) -> None:
        take(self, message, now)  # type: ignore[arg-type]
        self._commit(self.last)  # without waiting for the others

    monkeypatch.setattr(Chain, "_take", hasty)
    assert some_fail(range(150))


def test_a_clock_that_looks_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_find", _any_part)
    assert some_fail(range(60))


def _any_part(ledger: Ledger, rank: int, stop: int) -> tuple[int, int] | None:
    del rank
    for step in range(ledger.oldest, stop):
        entry = ledger.steps.get(step)
        for part in range(ledger.terms.parts):
            if entry is None or (part not in entry.done and not entry.claimed.get(part)):
                return step, part
    return None


def test_a_new_server_that_takes_nothing_for_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Node._take_view

    def hasty(self: Node, view: View, now: float) -> None:
        take(self, view, now)
        for chain in self.chains.values():
            chain.whole = True

    monkeypatch.setattr(Node, "_take_view", hasty)
    assert some_fail(range(60))


def test_histories_that_fit_no_order_are_refused() -> None:
    def history(parts: list[set[int]], times: list[tuple[float, float]]) -> JobHistory:
        writes = [WriteEvent(1, 0.0, 1.0, 0), WriteEvent(1, 0.0, 1.0, 1)]
        reads = [Read(1, a, b, 0, frozenset(p)) for p, (a, b) in zip(parts, times, strict=True)]
        return JobHistory(reads, writes)

    check_linearised(history([{0}, {0, 1}], [(0.1, 0.2), (0.3, 0.4)]), 1, "")
    with pytest.raises(AssertionError, match="misses acknowledged"):
        check_linearised(history([{0}], [(2.0, 2.1)]), 1, "")
    with pytest.raises(AssertionError, match="contradict"):
        check_linearised(history([{0}, {1}], [(0.1, 0.2), (0.1, 0.2)]), 1, "")
    with pytest.raises(AssertionError, match="shows less"):
        check_linearised(history([{0}, {0, 1}], [(0.5, 0.6), (0.1, 0.2)]), 1, "")
