"""Who is slower than the others, and whose loss is far from theirs: judged by windows of a few steps.

Waiting does not count: a rank that waits for a slow one is not slow. Only ranks with the same part of the model are
compared, for stages of a pipeline need not take equally long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 8
"""Steps between two looks. Two windows in a row decide, so that a straggler is named within 20 steps."""
SPAN_SECONDS = 1.0
"""What passes sooner is no straggler: the scheduler of a busy host lets processes wait for some hundredths of it."""
SLOW = 1.3
FAST_AGAIN = 1.15
LEAST_SECONDS = 0.0005
"""A smaller difference is noise, whatever its ratio."""
IN_A_ROW = 2
FAR = 10.0
"""The loss of a rank that is so many times that of the others has other data, or another model."""

Place = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """What a rank has seen in a window."""

    seconds: float
    """The median of its computing times; 0 where it has none."""
    loss: float
    """Its own mean loss in the last step; 0 where it has none."""


@dataclass(frozen=True)
class Sentence:
    """Something to say, and what the event log says of it."""

    text: str
    event: str = ""
    facts: dict[str, object] = field(default_factory=dict)


@dataclass
class _Rank:
    slow: int = 0
    """Windows in a row."""
    since: float = 0.0
    """When the first of them began."""
    named: bool = False
    far: int = 0
    far_named: bool = False


class Stragglers:
    """Sees the windows of all ranks, and says what has changed.

    >>> found = Stragglers([(0, 0)] * 3, ["a", "a", "b"])
    >>> rows = [Row(0.010, 1.0), Row(0.010, 1.1), Row(0.020, 0.9)]
    >>> found.see(8, rows, now=0.8), found.see(16, rows, now=1.6)[0].facts["rank"]
    ([], 2)
    """

    def __init__(self, places: Sequence[Place], hosts: Sequence[str]) -> None:
        """`places`: which part of the model each rank has; `hosts`: where each is."""
        self._places = list(places)
        self._hosts = list(hosts)
        self._ranks = [_Rank() for _ in places]
        self._seen = 0.0
        """When the window before ended."""

    def see(self, step: int, rows: Sequence[Row], now: float) -> list[Sentence]:
        """A window has ended with this step, at this moment of a monotonic clock."""
        said: list[Sentence] = []
        begun = self._seen
        self._seen = now
        for rank, row in enumerate(rows):
            others = [
                rows[other]
                for other, place in enumerate(self._places)
                if other != rank and place == self._places[rank]
            ]
            said += self._speed(step, rank, row, [o.seconds for o in others if o.seconds > 0], (begun, now))
            said += self._loss(step, rank, row.loss, [abs(other.loss) for other in others if other.loss])
        return said

    def _speed(
        self, step: int, rank: int, row: Row, others: Sequence[float], window: tuple[float, float]
    ) -> list[Sentence]:
        if not others or row.seconds <= 0:
            return []
        one, usual = self._ranks[rank], median(others)
        ratio = row.seconds / usual
        slow = ratio >= SLOW and row.seconds - usual >= LEAST_SECONDS
        one.slow = one.slow + 1 if slow else 0
        one.since = window[0] if one.slow == 1 else one.since
        if one.named and ratio < FAST_AGAIN:
            one.named = False
            return [Sentence(f"rank {rank} keeps up with the others again, after step {step}")]
        if one.named or one.slow < IN_A_ROW or window[1] - one.since < SPAN_SECONDS:
            return []
        one.named = True
        host = self._hosts[rank]
        where = f" (host {host})" if len(set(self._hosts)) > 1 else ""
        why = f"its steps take {1000 * row.seconds:.3g} ms of computing, those of the others {1000 * usual:.3g} ms"
        text = f"rank {rank}{where} is {ratio:.1f} times slower than the others, after step {step}: {why}; they wait"
        text += " for it; balance='dynamic' would give it fewer samples"
        facts: dict[str, object] = {"rank": rank, "ratio": round(ratio, 3), "after": step, "why": why}
        return [Sentence(text, "straggler", facts | {"host": host})]

    def _loss(self, step: int, rank: int, loss: float, others: Sequence[float]) -> list[Sentence]:
        if not others or not math.isfinite(loss):
            return []
        one, usual = self._ranks[rank], median(others)
        far = usual > 0 and abs(loss) >= FAR * usual
        one.far = one.far + 1 if far else 0
        if one.far_named or one.far < IN_A_ROW:
            return []
        one.far_named = True
        text = f"the loss of rank {rank} is {loss:.3g}, and {usual:.3g} on the others, after step {step}"
        return [Sentence(f"{text}: does it get other data, or other targets?")]
