"""The measurement: every contestant at every rate, in rounds, and then the loss that each reaches.

At a rate all contestants exist side by side and take turns, so that load from elsewhere meets all alike. They are built
before the rate is set, and then make a few steps that do not count. Those whose steps repeat only after a period make
one whole period, spread over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.network.contestants import BASELINE, Contestant
from benchmarks.network.measured import AtRate, Lap, Learned, Measured, Timed
from benchmarks.network.pair import HostFailed, Pair, start_pair
from benchmarks.network.runners import Case
from benchmarks.workload.rates import show_rate
from benchmarks.workload.text import size_for
from shoal.errors import ConfigError, ShoalError
from shoal.testing.hosts import Hosts

SLOW = 2.0
"""Seconds: whoever takes longer for a step makes one in a turn, others two."""
NUMBERS = 8
"""Numbers that a contestant keeps for each parameter, about: value, gradient, optimizer's two, residuals, buckets."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How large the contest is."""

    rates: tuple[int, ...]
    steps: int
    """Of the part that compares losses."""
    parameters: float
    """Of the model whose steps are timed."""
    small: float
    """Parameters of the model whose losses are compared."""
    rounds: int
    batch: int
    """Samples of one worker in a timed step."""
    small_batch: int = 8

    @property
    def timed_case(self) -> Case:
        """What the timed steps train."""
        size = size_for(self.parameters)
        return Case(size.width, size.depth, self.batch, steps=10**6)

    @property
    def learning_case(self) -> Case:
        """What the losses come from."""
        size, warmup = size_for(self.small), max(1, self.steps // 20)
        case = Case(size.width, size.depth, self.small_batch, self.steps, rate=3e-3)
        return replace(case, schedule=f"cosine(warmup={warmup}, floor=0.05)")


class Dropped(Exception):
    """A contestant failed; the others go on without it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name, self.reason = name, reason


def hold_contest(hosts: Hosts, entered: Sequence[Contestant], settings: Settings, say: Say) -> Measured:
    """Measure everybody. Who fails is left out from there on, with the reason."""
    _check_memory(len(entered), settings.timed_case)
    failed: dict[str, str] = {}

    def without_failures(part: Callable[[list[Contestant]], Any]) -> Any:
        while True:
            try:
                return part([one for one in entered if one.name not in failed])
            except Dropped as dropped:
                say(f"{dropped.name} is out: {dropped.reason}")
                if dropped.name == BASELINE:
                    raise ShoalError(f"torch DDP failed, and all are compared with it: {dropped}") from None
                failed[dropped.name] = dropped.reason

    learned: dict[str, Learned] = without_failures(partial(_learn, hosts, settings.learning_case, say))
    rates: list[AtRate] = []
    for rate in settings.rates:
        rates.append(without_failures(partial(_time, hosts, settings, rate, say)))
    about = {
        "timed_parameters": settings.timed_case.size.parameters,
        "timed_batch": settings.batch,
        "learning_parameters": settings.learning_case.size.parameters,
        "learning_batch": settings.small_batch,
        "steps": settings.steps,
        "rounds": settings.rounds,
    }
    return Measured(about, tuple(rates), learned, failed)


def _learn(hosts: Hosts, case: Case, say: Say, entered: Sequence[Contestant]) -> dict[str, Learned]:
    found: dict[str, Learned] = {}
    if case.steps == 0:
        return found
    hosts.limit(None)
    with start_pair(hosts) as pair:
        for number, one in enumerate(entered, start=1):
            say(f"losses, {case.steps} steps: {one.name} ({number} of {len(entered)})")
            _ask(pair, one, 120, {"do": "make", "case": case.to_json()})
            answers = _ask(pair, one, 60 + case.steps, {"do": "run", "steps": case.steps})
            both = zip(*(answer["losses"] for answer in answers), strict=True)
            (final, _) = _ask(pair, one, 120, {"do": "measure"})
            found[one.name] = Learned(tuple(map(statistics.mean, both)), final["loss"])
            _ask(pair, one, 60, {"do": "drop"})
    return found


def _time(hosts: Hosts, settings: Settings, rate: int, say: Say, entered: Sequence[Contestant]) -> AtRate:
    hosts.limit(None)
    label, case = show_rate(rate), settings.timed_case
    # A whole model once there and back, with room for what nobody foresaw.
    patience = 120 + 20 * 4 * case.size.parameters * 8 / rate
    with start_pair(hosts) as pair:
        for one in entered:
            say(f"{label}: building {one.name}")
            _ask(pair, one, 120, {"do": "make", "case": case.to_json()})
        hosts.limit(rate)
        probed = _probe(pair, rate)
        pace: dict[str, float] = {}
        for one in entered:
            say(f"{label}: {one.name} warms up")
            pace[one.name] = _lap(pair, one, one.warmup, patience * one.warmup).seconds / one.warmup
        laps: dict[str, list[Lap]] = {one.name: [] for one in entered}
        for turn in range(settings.rounds):
            for one in entered if turn % 2 == 0 else reversed(entered):
                steps = steps_in_turn(one, turn, settings.rounds, pace[one.name])
                if steps:
                    say(f"{label}, round {turn + 1} of {settings.rounds}: {one.name}, {steps} steps")
                    laps[one.name].append(_lap(pair, one, steps, patience * steps))
        timed = {one.name: Timed(one.period, tuple(laps[one.name])) for one in entered}
        return AtRate(rate, probed, timed, pair.said())


def steps_in_turn(one: Contestant, turn: int, rounds: int, pace: float) -> int:
    """Steps in one turn. Over all turns those with a period make just one, or the smallest multiple that fills them."""
    if one.period == 1:
        return 1 if pace > SLOW else 2
    whole = one.period * -(-2 * rounds // one.period)
    return whole * (turn + 1) // rounds - whole * turn // rounds


def _lap(pair: Pair, one: Contestant, steps: int, patience: float) -> Lap:
    answers = _ask(pair, one, patience, {"do": "run", "steps": steps})
    seconds = max(answer["seconds"] for answer in answers)
    return Lap(steps, seconds, statistics.mean(answer["bytes"] for answer in answers))


def _probe(pair: Pair, rate: int) -> float:
    """What the wire carries each way: a second's worth, or 64 MB."""
    size = min(rate // 8, 64_000_000)
    answers = pair.ask(120, {"do": "probe", "bytes": size})
    return statistics.mean(8 * float(answer["bytes"]) / float(answer["seconds"]) for answer in answers)


def _ask(pair: Pair, one: Contestant, seconds: float, command: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        return pair.ask(seconds, {**command, "name": one.name})
    except HostFailed as failure:
        raise Dropped(one.name, str(failure)) from None


def _check_memory(contestants: int, case: Case) -> None:
    need = 2 * contestants * NUMBERS * 4 * case.size.parameters
    free = psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"{contestants} contestants × 2 hosts need about {need / 1e9:.1f} GB side by side, and {free / 1e9:.1f} GB "
            "are free; name fewer strategies, or fewer parameters."
        )
