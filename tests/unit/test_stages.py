"""Stages keep their order whatever takes how long, and who sits where is found for any hosts."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.world.network.stage_threads import Stages
from shoal.world.two_level.groups import Seating
from shoal.world.two_level.hierarchical import equal_hosts


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.0005]), min_size=3, max_size=3), min_size=1, max_size=12))
def test_every_stage_takes_work_in_the_order_it_came(pauses: list[list[float]]) -> None:
    stages, seen = Stages(3, "test"), [[], [], []]  # type: ignore[var-annotated]

    def step(stage: int, number: int) -> None:
        time.sleep(pauses[number][stage])
        seen[stage].append(number)

    works = []
    for number in range(len(pauses)):
        works.append(stages.hand_in([lambda s=s, n=number: step(s, n) for s in range(3)]))
    for work in reversed(works):
        work.wait()
    assert seen == [list(range(len(pauses)))] * 3
    stages.close()


def test_after_a_failure_nothing_follows() -> None:
    stages, seen = Stages(2, "test"), []

    def fail() -> None:
        raise ValueError("lost")

    good = stages.hand_in([lambda: seen.append("a"), lambda: seen.append("b")])
    bad = stages.hand_in([fail, lambda: seen.append("c")])
    after = stages.hand_in([lambda: seen.append("d"), lambda: seen.append("e")])
    good.wait()
    for work in (bad, after):
        with pytest.raises(ValueError, match="lost"):
            work.wait()
    assert sorted(seen) == ["a", "b"]
    stages.close()


def test_threads_end_with_their_line() -> None:
    stages = Stages(2, "ends-with-its-line")
    stages.hand_in([lambda: None, lambda: None]).wait()
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("ends-with-its-line")]
    assert len(mine) == 2
    del stages
    gc.collect()
    for thread in mine:
        thread.join(5.0)
        assert not thread.is_alive()


@given(st.integers(2, 5), st.integers(2, 5), st.randoms(use_true_random=False))
def test_places_of_any_hosts(hosts: int, width: int, draw: object) -> None:
    names = [f"host{number % hosts}" for number in range(hosts * width)]
    draw.shuffle(names)  # type: ignore[attr-defined]
    found = equal_hosts(names)
    assert found is not None
    seatings = [Seating.of(found, rank) for rank in range(len(names))]
    assert sorted((one.host, one.place) for one in seatings) == [
        (h, p) for h in range(hosts) for p in range(width)
    ]
    for rank, seating in enumerate(seatings):
        assert {names[other] for other in found[seating.host]} == {names[rank]}
        assert seating.peers[seating.host] == rank
        assert all(seatings[peer].place == seating.place for peer in seating.peers)
        assert [seating.seat(other) for other in range(len(names))] == [(o.host, o.place) for o in seatings]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_levels_only_where_all_hosts_have_as_many_and_more_than_one(names: list[str]) -> None:
    counts = {names.count(name) for name in names}
    useful = len(set(names)) > 1 and len(counts) == 1 and counts != {1}
    assert (equal_hosts(names) is not None) == useful
