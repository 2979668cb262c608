"""The clocks and the ledger that asks them: what each lets begin, how dssp adapts, and copies in the middle."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.clock import TABLE, make_clock, make_clocks
from shoal.clock.base import Clock
from shoal.clock.dssp import Dssp
from shoal.errors import ConfigError
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.protocol.state_machine import Operation, Refused
from shoal.server.protocol.work_terms import WorkTerms
from shoal.types import Promise

EXAMPLES = {"bsp": "bsp", "ssp": "ssp(2)", "asp": "asp", "dssp": "dssp(1, 4)"}
"""Every clock of the table, with options."""
EVENTS = st.lists(st.sampled_from(["granted", "refused", "finished"]), max_size=40)


def tell(clock: Clock, events: list[str]) -> None:
    """Tell a clock what came of claims, each as far ahead as it allows."""
    for event in events:
        if event == "granted":
            clock.granted(max(ahead for ahead in range(9) if clock.may_begin(ahead, 0)))
        elif event == "refused":
            clock.refused()
        else:
            clock.finished()


# Every clock of the table.


def test_every_clock_has_an_example() -> None:
    assert set(EXAMPLES) == set(TABLE)


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_a_clock_prints_what_it_was_read_from(text: str) -> None:
    assert str(make_clock(text)) == text


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
@settings(max_examples=50, deadline=None)
@given(events=EVENTS, ahead=st.integers(0, 12), oldest=st.integers(0, 100))
def test_the_contract(text: str, events: list[str], ahead: int, oldest: int) -> None:
    new, told = make_clock(text), make_clock(text)
    tell(told, events)
    allowed = told.may_begin(oldest + ahead, oldest)
    assert told.may_begin(oldest, oldest), "the oldest step can never begin"
    assert allowed <= (told.bound is None or ahead <= told.bound), "further ahead than the bound"
    assert new.may_begin(oldest + ahead, oldest) <= allowed, "a new clock allows more than one that was told"
    assert not (told.together and ahead and allowed), "parts together are parts of the oldest step"
    assert (told.promise is Promise.EXACT) <= told.together


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
@settings(max_examples=50, deadline=None)
@given(before=EVENTS, after=EVENTS)
def test_a_copy_goes_on_alike(text: str, before: list[str], after: list[str]) -> None:
    first, copy = make_clock(text), make_clock(text)
    tell(first, before)
    copy.restore(msgpack.unpackb(msgpack.packb(first.state())))
    for clock in (first, copy):
        tell(clock, after)
    assert copy.state() == first.state()
    assert [copy.may_begin(n, 0) for n in range(9)] == [first.may_begin(n, 0) for n in range(9)]


# What bsp, ssp and asp allow, as two numbers: so many steps ahead, and whether parts go together.


@settings(max_examples=200, deadline=None)
@given(window=st.integers(-1, 6), step=st.integers(0, 30), oldest=st.integers(0, 30))
def test_a_window(window: int, step: int, oldest: int) -> None:
    clock = make_clock("asp" if window < 0 else f"ssp({window})")
    assert clock.together == (window == 0)
    assert clock.may_begin(step, oldest) == (not 0 <= window < step - oldest)


# dssp.


@settings(max_examples=200, deadline=None)
@given(low=st.integers(0, 4), more=st.integers(1, 4), events=EVENTS)
def test_dssp_stays_between_its_bounds(low: int, more: int, events: list[str]) -> None:
    clock = Dssp(low, low + more)
    for event in events:
        before = clock.allowed
        tell(clock, [event])
        assert low <= clock.allowed <= low + more
        assert abs(clock.allowed - before) <= (event == "finished"), "one step at a time, after a step"
        assert clock.may_begin(low, 0), "a worker within the lower bound waits"
        assert not clock.may_begin(low + more + 1, 0)


def test_dssp_follows_the_workers() -> None:
    clock = Dssp(1, 3)
    for wanted in (2, 3, 3):
        tell(clock, ["granted", "refused", "refused", "finished"])
        assert clock.allowed == wanted, "who waits gets one step more"
    tell(clock, ["granted", "finished"])
    assert clock.allowed == 3, "what is used stays"
    for wanted in (2, 1, 1):
        clock.granted(0)
        clock.finished()
        assert clock.allowed == wanted, "what nobody uses goes"


@pytest.mark.parametrize("text", ["dssp(2, 2)", "dssp(3, 1)", "dssp(-1, 2)"])
def test_dssp_without_room_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use 0 <= low < high"):
        make_clock(text)


def test_clocks_of_a_run() -> None:
    made = make_clocks("dssp(1, 4)", None, "ssp(2)", 10)
    assert [(begin, str(clock)) for begin, clock in made] == [(0, "dssp(1, 4)"), (10, "ssp(2)")]


# The ledger.


def ledger(clock: str, parts: int = 3) -> Ledger:
    made = Ledger()
    for rank in range(parts):
        made.apply(Operation("join", args={"rank": rank, "model": None}, client=10 + rank))
    made.apply(Operation("begin", args={"join_state": None}))
    made.apply(Operation("agree", args={"parts": parts, "clocks": [[0, clock]], "backup": 0}))
    return made


def plain(machine: Ledger) -> bytes:
    packed: bytes = msgpack.packb(machine.snapshot()[0])
    return packed


def claim(machine: Ledger, rank: int) -> dict[str, Any]:
    args = {"applied": None, "join_state": None, "stop": 100}
    found: dict[str, Any] = machine.apply(Operation("claim", args=args, client=10 + rank)).value
    return found


def work(machine: Ledger, seed: int, rounds: int) -> list[int]:
    """Workers of uneven speed, in an order by seed: how far ahead each claim was granted, -1 for a refusal."""
    draw = random.Random(seed)
    held: dict[int, tuple[int, int]] = {}
    for step, entry in machine.steps.items():
        held |= {who - 10: (step, part) for part, who in entry.claimed.items() if part not in entry.done}
    seen = []
    for _ in range(rounds):
        rank = draw.choice([0, 0, 0, 0, 1, 1, 2])
        if rank in held:
            step, part = held.pop(rank)
            args = {"part": part, "total": 1.0, "count": 1.0, "used": "1"}
            machine.apply(Operation("done", step, args, client=10 + rank))
            continue
        found = claim(machine, rank)
        seen.append(-1 if found["step"] is None else found["step"] - found["floor"])
        if found["step"] is not None:
            held[rank] = (found["step"], found["part"])
    return seen


@pytest.mark.parametrize("clock", ["ssp(1)", "ssp(3)", "asp", "dssp(0, 2)", "dssp(1, 3)"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 80))
def test_a_ledger_that_joins_in_the_middle_is_bit_equal(clock: str, seed: int, cut: int) -> None:
    first = ledger(clock)
    work(first, seed, cut)
    copy = Ledger()
    copy.restore(msgpack.unpackb(plain(first)), torch.empty(0, dtype=torch.uint8))
    assert plain(copy) == plain(first)
    assert work(copy, seed + 1, 60) == work(first, seed + 1, 60)
    assert plain(copy) == plain(first)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_claim_under_dssp_is_further_ahead_than_its_upper_bound(seed: int) -> None:
    machine = ledger("dssp(1, 3)")
    seen = work(machine, seed, 200)
    assert max(seen) <= 3


def test_the_ledger_lets_dssp_adapt() -> None:
    machine = ledger("dssp(1, 3)", parts=2)
    ahead = []
    for step in range(4):  # rank 1 holds one part of each step, rank 0 does all that it gets
        slow = claim(machine, 1)
        while (found := claim(machine, 0))["step"] is not None:
            ahead.append(found["step"] - found["floor"])
            args = {"part": found["part"], "total": 1.0, "count": 1.0, "used": ""}
            machine.apply(Operation("done", found["step"], args, client=10))
        args = {"part": slow["part"], "total": 1.0, "count": 1.0, "used": ""}
        machine.apply(Operation("done", slow["step"], args, client=11))
        assert max(ahead) == min(1 + step, 3)


def test_agreeing_again_forgets_nothing() -> None:
    machine = ledger("dssp(1, 3)")
    work(machine, 3, 60)
    before = plain(machine)
    machine.apply(Operation("agree", args={"parts": 3, "clocks": [[0, "dssp(1, 3)"]], "backup": 0}))
    assert plain(machine) == before


GOOD = {"parts": 2, "clocks": [[0, "bsp"], [3, "asp"]], "backup": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parts": -1}, "whole number"),
        ({"parts": True}, "whole number"),
        ({"parts": 0, "backup": 0}, "none of 0 workers"),
        ({"backup": 2}, "none of 2 workers"),
        ({"clocks": []}, "the first begins at step 0"),
        ({"clocks": [[1, "bsp"]]}, "the first begins at step 0"),
        ({"clocks": [[0, "bsp"], [0, "asp"]]}, "each later one after it"),
        ({"clocks": [[0, 3]]}, "short text"),
        ({"clocks": [[0, "ssp(" + "1" * 300 + ")"]]}, "short text"),
        ({"clocks": [[0, "bps"]]}, "did you mean 'bsp'"),
        ({"clocks": [[0, "dssp(4, 1)"]]}, "use 0 <= low < high"),
    ],
)
def test_terms_are_checked_before_they_are_believed(change: dict[str, Any], reason: str) -> None:
    assert WorkTerms.of(GOOD).message() == {**GOOD, "clocks": [(0, "bsp"), (3, "asp")]}  # type: ignore[arg-type]
    machine = Ledger()
    before = plain(machine)
    with pytest.raises(Refused, match=reason):
        machine.apply(Operation("agree", args={**GOOD, **change}))
    assert plain(machine) == before


def test_workers_that_disagree_are_told_what_they_have() -> None:
    machine = ledger("ssp(2)", parts=3)
    with pytest.raises(
        Refused, match=r"one has 3 workers and clock bsp, asp from step 5 on, the others .*ssp\(2\)"
    ):
        machine.apply(Operation("agree", args={"parts": 3, "clocks": [[0, "bsp"], [5, "asp"]], "backup": 0}))
