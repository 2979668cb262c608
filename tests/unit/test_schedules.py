"""Pipeline schedules as data: complete, in order, free of deadlock, bounded, as idle as they say, and torch agrees."""

from __future__ import annotations

import graphlib
import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from shoal.errors import ConfigError
from shoal.pipeline import TABLE
from shoal.pipeline.base import Action, ActionKind, Costs
from shoal.pipeline.check_schedule import check, simulate
from shoal.pipeline.grid import draw
from shoal.pipeline.lower import to_torch

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741

NAMES = st.sampled_from(sorted(TABLE))
RANKS = st.integers(1, 8)
MICRO = st.integers(1, 24)
TIME = st.floats(0.1, 10.0)
COSTS = st.builds(Costs, TIME, TIME, TIME)
Lists = list[list[Action]]


@pytest.mark.parametrize("name", TABLE)
def test_every_schedule_says_when_to_use_it(name: str) -> None:
    schedule = TABLE[name]
    assert "When to use:" in (importlib.import_module(schedule.__module__).__doc__ or "")
    assert not inspect.isabstract(schedule)


# What is promised holds.


@settings(deadline=None)
@given(NAMES, RANKS, MICRO)
def test_a_schedule_is_right_and_as_idle_as_its_formula_says(name: str, ranks: int, micro: int) -> None:
    schedule = TABLE[name]
    run = simulate(schedule, ranks, micro)
    assert run.idle == pytest.approx(schedule.bubble(ranks, micro), abs=1e-12)
    homes = {span.action.stage: rank for rank, spans in enumerate(run.spans) for span in spans}
    assert homes == {s: schedule.rank_of(s, ranks) for s in range(ranks * schedule.stages_per_rank)}


@settings(deadline=None)
@given(NAMES, RANKS, MICRO)
def test_no_rank_holds_more_than_its_schedule_declares(name: str, ranks: int, micro: int) -> None:
    schedule = TABLE[name]
    bounds = [schedule.peak(rank, ranks, micro) for rank in range(ranks)]
    peaks = simulate(schedule, ranks, micro).peaks
    assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
    if schedule.stages_per_rank == 1 or micro % ranks == 0:
        assert list(peaks) == bounds, "the bound is reached: a looser one says too little"


def test_what_is_held_with_many_micro_batches() -> None:
    held = {name: simulate(schedule, 4, 32).peaks for name, schedule in TABLE.items()}
    assert held == {
        "gpipe": (32, 32, 32, 32),
        "1f1b": (4, 3, 2, 1),
        "interleaved": (11, 9, 7, 5),  # of thin stages: half as large
        "zerobubble": (4, 4, 4, 4),
    }


@settings(deadline=None)
@given(NAMES, RANKS, MICRO, COSTS)
def test_the_formula_holds_for_other_costs(name: str, ranks: int, micro: int, costs: Costs) -> None:
    schedule = TABLE[name]
    assume(schedule.stages_per_rank == 1 or micro % ranks == 0 or costs.backward >= costs.forward)
    run = simulate(schedule, ranks, micro, costs)
    assert run.makespan == pytest.approx(schedule.makespan(ranks, micro, costs), rel=1e-9)
    assert run.idle == pytest.approx(schedule.bubble(ranks, micro, costs), abs=1e-9)


@given(st.integers(2, 8), st.integers(1, 6))
def test_how_idle_times_compare(ranks: int, rounds: int) -> None:
    """Idle time per time of work: interleaved has half of 1f1b's, zero bubble a third."""
    share = {name: s.bubble(ranks, ranks * rounds) for name, s in TABLE.items()}
    idle = {name: part / (1 - part) for name, part in share.items()}
    assert idle["gpipe"] == pytest.approx(idle["1f1b"])
    assert idle["interleaved"] == pytest.approx(idle["1f1b"] / 2)
    assert idle["zerobubble"] == pytest.approx(idle["1f1b"] / 3)


@settings(deadline=None)
@given(NAMES, st.integers(2, 6), MICRO, st.data())
def test_what_waits_at_a_rank_is_bounded_by_what_is_held(
    name: str, ranks: int, micro: int, data: st.DataObject
) -> None:
    """However unequal the stages: what came and is not used yet is still held by its sender, or here."""
    schedule = TABLE[name]
    stages = ranks * schedule.stages_per_rank
    run = simulate(schedule, ranks, micro, data.draw(st.lists(COSTS, min_size=stages, max_size=stages)))
    for rank in range(ranks):
        assert run.waiting[rank] <= run.peaks[rank - 1] + run.peaks[rank]
    assert 0 <= run.idle < 1


def test_a_slow_stage_lets_inputs_pile_up_under_gpipe_and_not_under_1f1b() -> None:
    costs = [Costs(), Costs(forward=100.0)]
    assert simulate(TABLE["gpipe"], 2, 8, costs).waiting == (0, 7)
    assert simulate(TABLE["1f1b"], 2, 8, costs).waiting == (0, 1)


def test_times_follow_from_the_costs_of_each_stage() -> None:
    run = simulate(TABLE["gpipe"], 2, 1, [Costs(2, 3, 4), Costs(5, 6, 7)])
    assert [[(str(s.action), s.start, s.end) for s in spans] for spans in run.spans] == [
        [("0F0", 0, 2), ("0B0", 20, 27)],
        [("1F0", 2, 7), ("1B0", 7, 20)],
    ]
    assert run.idle == pytest.approx(0.5)


def test_one_micro_batch_is_plain_layer_placement() -> None:
    spans = sorted((s.start, s.end) for mine in simulate(TABLE["gpipe"], 4, 1).spans for s in mine)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("ranks", "micro"), [(0, 8), (2, 0), (2, -1)])
def test_numbers_that_cannot_work_are_refused(name: str, ranks: int, micro: int) -> None:
    refusal = TABLE[name].refuse(ranks, micro)
    assert refusal is not None
    with pytest.raises(ConfigError, match="needs at least 1") as error:
        TABLE[name].actions(ranks, micro)
    assert str(error.value) == refusal
    assert TABLE[name].refuse(2, 1) is None


# What is broken is caught.


def possible(actions: Lists, stages: int) -> bool:
    """Whether any order of all actions respects the lists and the data: by another algorithm than check's."""
    graph: graphlib.TopologicalSorter[Action] = graphlib.TopologicalSorter()
    present = {action for order in actions for action in order}
    for order in actions:
        for before, after in itertools.pairwise(order):
            graph.add(after, before)
    for stage, kind, micro in [(a.stage, a.kind, a.micro) for a in present]:
        inputs = {
            F: [(stage - 1, F)],
            B: [(stage, F), (stage + 1, B), (stage + 1, I)],
            I: [(stage, F), (stage + 1, B), (stage + 1, I)],
            W: [(stage, I)],
        }
        for other, wanted in inputs[kind]:
            if 0 <= other < stages and Action(other, wanted, micro) in present:
                graph.add(Action(stage, kind, micro), Action(other, wanted, micro))
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return True


@st.composite
def places(draw: st.DrawFn) -> tuple[str, int, int, Lists, int]:
    """A schedule, its number of stages, micro-batches and lists, and a rank with something to break."""
    name = draw(NAMES)
    ranks, micro = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    actions = TABLE[name].actions(ranks, micro)
    return name, ranks * TABLE[name].stages_per_rank, micro, actions, draw(st.integers(0, ranks - 1))


@settings(deadline=None, max_examples=300)
@given(places(), st.data())
def test_swapping_two_actions_is_caught_if_and_only_if_it_cannot_work(
    place: tuple[str, int, int, Lists, int], data: st.DataObject
) -> None:
    _, stages, micro, actions, rank = place
    order = actions[rank]
    one, two = data.draw(st.lists(st.integers(0, len(order) - 1), min_size=2, max_size=2, unique=True))
    order[one], order[two] = order[two], order[one]
    if possible(actions, stages):
        check(actions, stages, micro)
    else:
        with pytest.raises(ConfigError, match=r"nobody can go on|runs \w+ before"):
            check(actions, stages, micro)


@settings(deadline=None)
@given(places(), st.data())
def test_a_missing_action_is_named(place: tuple[str, int, int, Lists, int], data: st.DataObject) -> None:
    _, stages, micro, actions, rank = place
    gone = actions[rank].pop(data.draw(st.integers(0, len(actions[rank]) - 1)))
    with pytest.raises(ConfigError, match=f"^no rank runs {gone};"):
        check(actions, stages, micro)


@settings(deadline=None)
@given(places(), st.data())
def test_an_action_done_twice_is_named(place: tuple[str, int, int, Lists, int], data: st.DataObject) -> None:
    _, stages, micro, actions, rank = place
    again = data.draw(st.sampled_from(actions[rank]))
    actions[rank].insert(data.draw(st.integers(0, len(actions[rank]))), again)
    with pytest.raises(ConfigError, match=f"^rank {rank} runs {again} twice;"):
        check(actions, stages, micro)


@settings(deadline=None)
@given(places(), st.data())
def test_an_action_on_a_wrong_rank_is_named(
    place: tuple[str, int, int, Lists, int], data: st.DataObject
) -> None:
    _, stages, micro, actions, rank = place
    assume(len(actions) > 1)
    other = data.draw(st.sampled_from([r for r in range(len(actions)) if r != rank]))
    moved = data.draw(st.sampled_from(actions[rank]))
    actions[other].append(moved)
    with pytest.raises(ConfigError, match=rf"^stage {moved.stage} runs on rank \d, and on rank \d \("):
        check(actions, stages, micro)


def read(*lines: str) -> Lists:
    """Lists of actions from text such as "0F0 0B0"."""
    parts = [re.findall(r"(\d+)([FBIW])(\d+)", line) for line in lines]
    return [[Action(int(s), ActionKind[k], int(m)) for s, k, m in found] for found in parts]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (("0B0 0F0", "1F0 1B0"), "rank 0 runs 0B0 before 0F0"),
        (("0F0 0B0", "1F0 1W0 1I0"), "rank 1 runs 1W0 before 1I0"),
        (("0F0 0B0", "1F0 1I0 1B0 1W0"), "1B0 and 1I0, 1W0 are one backward pass done twice"),
        (("0F0 0B0", "1F0 1B0 1W0"), "1B0 and 1W0 are one backward pass done twice"),
        (("0F0 0B0", "1F0 1W0"), "no rank runs 1I0"),
        (("0F0 0B0", "1F0"), "no rank runs 1B0"),
        (("0F0 0B0", "1F0 1B0 2F0 2B0"), "rank 1 runs 2F0, but there are 2 stages and 1 micro-batches"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "rank 0 runs 0F1, but there are 2 stages and 1 micro-batches"),
        (("1F0 0F0 1B0 0B0",), "nobody can go on: rank 0 waits with 1F0 for stage 0"),
    ],
)
def test_what_is_wrong_is_said(lines: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        check(read(*lines), stages=2, microbatches=1)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    lists = read("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(
        ConfigError, match="rank 0 waits with 0B0 for stage 1, rank 1 waits with 1F1 for stage 0"
    ):
        check(lists, stages=2, microbatches=2)


def test_whole_and_split_backward_passes_mix() -> None:
    run = check(read("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0"), stages=2, microbatches=2)
    assert run.peaks == (2, 2)


def test_costs_are_one_for_all_or_one_for_each() -> None:
    with pytest.raises(ConfigError, match="there are 3 costs for 2 stages"):
        simulate(TABLE["1f1b"], 2, 2, [Costs()] * 3)


# torch agrees.


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", TABLE)
def test_torch_accepts_every_schedule(name: str, ranks: int) -> None:
    """What `_PipelineScheduleRuntime._prepare_schedule_with_comms` does with actions, and torch's dry run."""
    schedule = TABLE[name]
    stages = ranks * schedule.stages_per_rank
    for micro in range(1, 17):
        actions = schedule.actions(ranks, micro)
        homes = torch_schedules._validate_schedule(to_torch(actions), ranks, stages, micro)
        assert homes == {stage: schedule.rank_of(stage, ranks) for stage in range(stages)}
        runtime = {
            rank: torch_schedules._add_reduce_grad(torch_schedules._add_unshard_reshard(order), micro)
            for rank, order in to_torch(actions).items()
        }
        for lists in (to_torch(actions), runtime):
            complete = torch_schedules._add_send_recv(lists, homes.__getitem__, stages)
            for rank, order in complete.items():
                assert [str(a) for a in order if a.is_compute_op] == [str(a) for a in actions[rank]]
        messages = torch_schedules._add_send_recv(to_torch(actions), homes.__getitem__, stages)
        torch_schedules._simulate_comms_compute(messages, homes.__getitem__, stages)


def test_torch_refuses_what_check_refuses() -> None:
    """Else the test above could not fail."""
    lists = read("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(AssertionError, match="Malformed compute schedule"):
        torch_schedules._add_send_recv(to_torch(lists), lambda stage: stage, 2)


# The picture shows the schedule.


@settings(deadline=None)
@given(NAMES, st.integers(1, 6), st.integers(1, 12))
def test_the_grid_shows_every_action_and_every_idle_unit(name: str, ranks: int, micro: int) -> None:
    schedule = TABLE[name]
    run = simulate(schedule, ranks, micro)
    rows = [line.partition(" | ")[2] for line in draw(name, ranks, micro).splitlines() if " | " in line]
    assert len(rows) == ranks
    for row, spans in zip(rows, run.spans, strict=True):
        letters = [
            f"{a.kind.name if a.stage < ranks else a.kind.name.lower()}{a.micro}"
            for a in (s.action for s in spans)
        ]
        assert re.findall(r"[A-Za-z]\d+", row) == letters
        assert row.count(".") == run.makespan - sum(s.end - s.start for s in spans)


@pytest.mark.parametrize("name", TABLE)
def test_the_grid_fits_a_terminal(name: str) -> None:
    text = draw(name, 4, 8)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert f"idle {TABLE[name].bubble(4, 8):.1%}".replace("%", " %") in text


def test_actions_of_one_time_stand_in_one_column() -> None:
    rows = [line for line in draw("zerobubble", 4, 8).splitlines() if " | " in line]
    assert [row.index("F0") for row in rows] == [4, 7, 10, 13]
    assert [row.index("I0") for row in rows[1:]] == [4 + 3 * 6, 4 + 3 * 5, 4 + 3 * 4]


@pytest.mark.parametrize("name", ["1f1b", "zerobubble"])
def test_the_page_shows_what_is_drawn(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "pipeline.md"
    assert f"```text\n{draw(name, 4, 8)}\n```" in page.read_text()


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown pipeline schedule '1f1bb'; did you mean '1f1b'"):
        draw("1f1bb", 4, 8)
