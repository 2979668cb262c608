"""A pipeline on cores that workers may have to share: who computes when, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.pipeline.base import Action, ActionKind, Costs, Schedule


@dataclass(frozen=True)
class Cores:
    """How fast so many workers are that compute at the same time."""

    cores: float
    """As many can work without waiting for each other."""
    slowed: float = 1.0
    """How much longer work takes beside so many neighbours as there are cores: they share memory."""

    def rate(self, active: int) -> float:
        """Of each, if so many are at work; 1 alone.

        >>> Cores(2).rate(1), Cores(2).rate(4)
        (1.0, 0.5)
        """
        if active <= 1:
            return 1.0
        share = min(1.0, (active - 1) / max(self.cores - 1, 1))
        return min(1.0, self.cores / active) / (1 + (self.slowed - 1) * share)


def simulate(
    schedule: type[Schedule],
    ranks: int,
    microbatches: int,
    stages: Sequence[Costs],
    cores: Cores,
    replicas: int = 1,
    hop: float = 0.0,
) -> float:
    """Seconds until every rank has done all its actions. `stages`: the time alone of each; `hop`: that a message takes.

    Replicas do the same at the same time on the same cores.

    >>> from shoal.pipeline import TABLE
    >>> even = [Costs(1.0, 1.0, 1.0)] * 4
    >>> simulate(TABLE["gpipe"], 4, 8, even, Cores(100))
    33.0
    >>> simulate(TABLE["1f1b"], 4, 8, even, Cores(100)) == TABLE["1f1b"].makespan(4, 8)
    True
    """
    orders = schedule.actions(ranks, microbatches)
    last = schedule.stages_per_rank * ranks - 1
    done: dict[tuple[int, ActionKind, int], float] = {}
    at, left, busy = [0] * ranks, [0.0] * ranks, [False] * ranks
    now, finished, total = 0.0, 0, sum(map(len, orders))
    while finished < total:
        wake = _start_ready(orders, at, left, busy, stages, done, now, hop, last)
        active = [rank for rank in range(ranks) if busy[rank]]
        if not active:
            now = wake
            continue
        rate = cores.rate(len(active) * replicas)
        span = min(left[rank] for rank in active) / rate
        if wake - now < span:
            span = wake - now
        now += span
        for rank in active:
            left[rank] -= span * rate
            if left[rank] <= 1e-12 * (1 + now):
                one = orders[rank][at[rank]]
                done[one.stage, one.kind, one.micro] = now
                busy[rank] = False
                at[rank] += 1
                finished += 1
    return now


def _start_ready(
    orders: Sequence[Sequence[Action]],
    at: list[int],
    left: list[float],
    busy: list[bool],
    stages: Sequence[Costs],
    done: dict[tuple[int, ActionKind, int], float],
    now: float,
    hop: float,
    last: int,
) -> float:
    """Begin what can begin; when the next message arrives that somebody waits for."""
    wake = float("inf")
    for rank, order in enumerate(orders):
        if busy[rank] or at[rank] == len(order):
            continue
        one = order[at[rank]]
        ready = _ready(one, done, hop, last)
        if ready <= now:
            busy[rank] = True
            left[rank] = stages[one.stage].of(one.kind)
        else:
            wake = min(wake, ready)
    return wake


def _ready(one: Action, done: dict[tuple[int, ActionKind, int], float], hop: float, last: int) -> float:
    """When what an action needs has arrived; infinity if it is not computed yet."""
    never = float("inf")
    if one.kind is ActionKind.F:
        return 0.0 if one.stage == 0 else done.get((one.stage - 1, ActionKind.F, one.micro), never) + hop
    if one.kind is ActionKind.W:
        return done.get((one.stage, ActionKind.I, one.micro), never)
    if one.stage == last:
        return done.get((one.stage, ActionKind.F, one.micro), never)
    after = min(done.get((one.stage + 1, kind, one.micro), never) for kind in (ActionKind.B, ActionKind.I))
    return after + hop
