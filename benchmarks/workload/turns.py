"""Contestants in turns, in the same processes: load from elsewhere then meets all of them alike."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report.result import Column, Goal, Row, Section
from shoal.world.world import World

Times = dict[str, list[float]]
"""Seconds, by contestant."""


def alternate(
    world: World, makers: Mapping[str, Callable[[], Callable[[], None]]], rounds: int, steps: int
) -> Times:
    """Seconds of every timed step. In each round each contestant is made anew, makes two steps that do not count, and
    so many that do: only one is in memory at a time."""
    times: Times = {name: [] for name in makers}
    for turn in range(rounds):
        for name in forth_and_back(list(makers), turn):
            step = makers[name]()
            for number in range(2 + steps):
                world.barrier()
                start = time.perf_counter()
                step()
                world.barrier()  # a step is over when the slowest worker is
                if number >= 2:
                    times[name].append(time.perf_counter() - start)
            del step
            gc.collect()
    return times


def forth_and_back(names: Sequence[str], turn: int) -> list[str]:
    """Nobody always follows the same other.

    >>> forth_and_back(["a", "b"], 0), forth_and_back(["a", "b"], 1)
    (['a', 'b'], ['b', 'a'])
    """
    return list(names) if turn % 2 == 0 else list(reversed(names))


@dataclass
class Seen:
    """What a contestant took in each turn, in seconds."""

    wall: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Of all cores, for this process and the contestant's servers."""


def take_turns(
    makers: Mapping[str, Callable[[], None]],
    turns: int,
    servers: Mapping[str, Sequence[int]],
    meet: Callable[[], None] = lambda: None,
    rounds: int = 1,
) -> dict[str, Seen]:
    """Measure every contestant in every turn, after two that do not count. `servers`: which processes work for it.

    `rounds`: so many times in a row, after a pause, so that work left over from one round meets the next of the same
    contestant; what is seen is of one.
    """
    seen = {name: Seen() for name in makers}
    gc.disable()
    for turn in range(turns + 2):
        for name in forth_and_back(list(makers), turn):
            pids = [os.getpid(), *servers.get(name, ())]
            time.sleep(0.05 if rounds > 1 else 0.0)
            meet()
            start, worked = time.perf_counter(), work_of(pids)
            for _ in range(rounds):
                makers[name]()
            meet()  # it is over when the slowest worker is
            if turn >= 2:
                seen[name].wall.append((time.perf_counter() - start) / rounds)
                seen[name].work.append((work_of(pids) - worked) / rounds)
        gc.collect()
    gc.enable()
    return seen


def work_of(pids: Sequence[int]) -> float:
    """Seconds that cores have worked for some processes."""
    # clock_getcpuclockid(3), which Python lacks
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def ratio_of(seen: Mapping[str, Seen], mine: str, theirs: str) -> float:
    """The median over the turns of how many times the other's time a contestant took."""
    return statistics.median(a / b for a, b in zip(seen[mine].wall, seen[theirs].wall, strict=True))


Ratio = tuple[str, str, float]
"""A contestant, another, and how many times the other's time it may take at most."""


def goals_of_medians(times: Mapping[str, Sequence[float]], goals: Sequence[Ratio]) -> list[Goal]:
    """Goals whose two contestants were there, by the ratio of their medians."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    here = [goal for goal in goals if goal[0] in medians and goal[1] in medians]
    return [Goal(f"{one} / {other}", medians[one] / medians[other], most) for one, other, most in here]


def goals_of_turns(seen: Mapping[str, Seen], goals: Sequence[Ratio]) -> list[Goal]:
    """Goals whose two contestants were there, turn by turn."""
    here = [goal for goal in goals if goal[0] in seen and goal[1] in seen]
    return [Goal(f"{one} / {other}", ratio_of(seen, one, other), most) for one, other, most in here]


def section_of_times(title: str, times: Mapping[str, Sequence[float]], beside: Sequence[str]) -> Section:
    """Medians and quartiles, and ratios of the medians to those of some."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    others = [name for name in beside if name in medians]
    rows: list[Row] = [
        [name, *milliseconds(times[name]), *(median / medians[other] for other in others)]
        for name, median in medians.items()
    ]
    return Section(title, [*TIMED, *(Column(f"/ {other}", "{:.3f}") for other in others)], rows)


def section_of_turns(title: str, seen: Mapping[str, Seen], beside: str) -> Section:
    """Medians and quartiles, and the ratios to one of them turn by turn; the same for the work of all cores."""
    works = {name: statistics.median(times.work) * 1e3 for name, times in seen.items()}
    rows: list[Row] = [
        [
            name,
            *milliseconds(times.wall),
            ratio_of(seen, name, beside),
            works[name],
            works[name] / works[beside],
        ]
        for name, times in seen.items()
    ]
    ratio = Column(f"/ {beside}", "{:.3f}")
    return Section(title, [*TIMED, ratio, Column("work ms", "{:.1f}"), ratio], rows)


TIMED = (
    Column("contestant"),
    Column("median ms", "{:.1f}"),
    Column("25 % below", "{:.1f}"),
    Column("75 % below", "{:.1f}"),
)


def milliseconds(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the two quartiles.

    >>> milliseconds([0.001, 0.002, 0.003])
    (2.0, 1.0, 3.0)
    """
    low, high = min(values), max(values)
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4)
    return statistics.median(values) * 1e3, low * 1e3, high * 1e3
