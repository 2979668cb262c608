"""The steps of one rank as numpy columns: what is in the log, and what comes.

A log of a million steps takes seconds to parse. So `Columns` answers at once from samples of it (follow.py) and exactly
as soon as a thread has been through it; from then on new lines are added as they come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.report.events import Event
from shoal.report.follow import Follower, Sampled

Array = npt.NDArray[Any]

NAMES = (
    *("loss", "lr", "grad_norm", "samples_per_second", "seconds", "data", "compute", "exposed", "update"),
    *("peak_memory", "bytes_sent", "time"),
)
"""Columns of a step; `metrics` and values of run.log come beside them."""

_GROW = 1 << 14
MOST_EVENTS = 5000
MOST_VALUES = 64
"""Names of the user's own; a script that makes up names without end fills no memory here."""
CHUNK = 2 << 20
ENOUGH = 300
"""Samples to draw a curve from."""


class Columns:
    """One log, as far as it has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.events: list[Event] = []
        """What is not a step; the newest, where there are very many."""
        self.bad = 0
        self.loaded = False
        """Whether the log has been read to its end once."""
        self._follower = Follower(path)
        self._count = 0
        self._steps = np.empty(_GROW, np.int64)
        self._table = np.empty((len(NAMES), _GROW))
        self._values: dict[str, tuple[list[int], list[float]]] = {}
        self._sampled: Sampled | None = None

    def sample(self) -> None:
        """Look at a few places, to have something to show while the log is read."""
        self._sampled = Sampled(self.path, 1024)

    def poll(self) -> bool:
        """Take in the next part of the log; whether there was anything."""
        events = self._follower.poll(CHUNK)
        with self.lock:
            self._add(events)
            self.bad = self._follower.bad
            if not events:
                self.loaded = True
                self._sampled = None
        return bool(events)

    @property
    def last(self) -> int:
        """The newest step."""
        if self._sampled is not None:
            return max((place.step for place in self._sampled.places[-1:]), default=0)
        return int(self._steps[self._count - 1]) if self._count else 0

    def read(
        self, names: Sequence[str], first: int = 0, last: int = 1 << 60
    ) -> tuple[Array, dict[str, Array], bool]:
        """Steps, their columns, and whether they are all there are: else they are samples."""
        with self.lock:
            sampled = self._sampled
            if sampled is None:
                steps = self._steps[: self._count]
                low, high = np.searchsorted(steps, [first, last + 1])
                return (
                    steps[low:high].copy(),
                    {n: self._table[NAMES.index(n), low:high].copy() for n in names},
                    True,
                )
        inside = [place.event for place in sampled.places if first <= place.step <= last]
        found = _last_pass(inside if len(inside) > ENOUGH else sampled.steps(max(first, 0), last, 2 * ENOUGH))
        steps = np.array([int(number(event.get("step"))) for event in found], np.int64)
        return steps, {n: np.array([number(e.get(n)) for e in found]) for n in names}, False

    def values(self) -> Mapping[str, tuple[Array, Array]]:
        """What the user measured, by name: after which steps, and the values."""
        with self.lock:
            return {name: (np.array(at), np.array(values)) for name, (at, values) in self._values.items()}

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            if "event" in event:
                self._add_event(event)
                continue
            step = event.get("step")
            if not isinstance(step, int) or isinstance(step, bool) or not 0 < step < 1 << 60:
                self.bad += 1
                continue
            if self._count and step <= self._steps[self._count - 1]:
                self._take_back(step)
            self._make_room()
            self._steps[self._count] = step
            self._table[:, self._count] = [number(event.get(name)) for name in NAMES]
            self._count += 1
            if isinstance(metrics := event.get("metrics"), dict):
                self._add_values(step, metrics)

    def add_values_of(self, event: Event) -> None:
        """What another process has measured of the run, as evaluators do."""
        if event.get("event") == "log" and isinstance(values := event.get("values"), dict):
            after = event.get("after")
            with self.lock:
                self._add_values(after if isinstance(after, int) else 0, values)

    def _add_event(self, event: Event) -> None:
        if event.get("event") == "log" and isinstance(values := event.get("values"), dict):
            after = event.get("after")
            self._add_values(after if isinstance(after, int) else 0, values)
            return
        after = int(self._steps[self._count - 1]) if self._count else 0
        self.events.append({"after": after, **event})
        if len(self.events) > MOST_EVENTS:
            del self.events[1 : MOST_EVENTS // 4]  # the first is the start

    def _add_values(self, step: int, values: Mapping[object, object]) -> None:
        for name, value in values.items():
            if isinstance(name, str) and (name in self._values or len(self._values) < MOST_VALUES):
                if isinstance(value, str):
                    continue
                at, found = self._values.setdefault(name[:80], ([], []))
                at.append(step)
                found.append(number(value))

    def _take_back(self, step: int) -> None:
        """A resumed run does this step again, and all after it."""
        self._count = int(np.searchsorted(self._steps[: self._count], step))
        for at, values in self._values.values():
            while at and at[-1] >= step:
                at.pop()
                values.pop()

    def _make_room(self) -> None:
        if self._count == len(self._steps):
            self._steps = np.concatenate([self._steps, np.empty_like(self._steps)])
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)


def number(value: object) -> float:
    """A number of a log that may hold anything; what is none is NaN.

    >>> number(3), number("3"), number(10**400), number(True)
    (3.0, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    try:
        found = float(value)
    except OverflowError:
        return float("nan")
    return found if isfinite(found) else float("nan")


def _last_pass(events: Sequence[Event]) -> list[Event]:
    """In the order of the log: what a later line says again counts there."""
    kept: list[Event] = []
    for event in events:
        while kept and number(kept[-1].get("step")) >= number(event.get("step")):
            kept.pop()
        kept.append(event)
    return kept


def thin(steps: Array, values: Array, points: int) -> dict[str, list[float | None]]:
    """A curve in at most so many points: of each stretch the mean, the least and the greatest.

    >>> thin(np.arange(4), np.array([1.0, 3.0, 2.0, 6.0]), 2)
    {'x': [0.5, 2.5], 'mean': [2.0, 4.0], 'low': [1.0, 2.0], 'high': [3.0, 6.0]}
    >>> thin(np.arange(2), np.array([1.0, np.nan]), 5)
    {'x': [0.0, 1.0], 'mean': [1.0, None]}
    """
    if len(steps) <= points:
        return {"x": plain(steps), "mean": plain(values)}
    edges = np.arange(points) * len(steps) // points
    known = np.isfinite(values)
    counts = np.add.reduceat(known, edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), edges) / counts
        x = np.add.reduceat(steps.astype(np.float64), edges) / np.diff([*edges, len(steps)])
    low = np.minimum.reduceat(np.where(known, values, np.inf), edges)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), edges)
    return {"x": plain(x), "mean": plain(mean), "low": plain(low), "high": plain(high)}


def plain(values: Array) -> list[float | None]:
    """For JSON, which has no NaN: six digits, or null.

    >>> plain(np.array([0.12345678, np.inf]))
    [0.123457, None]
    """
    return [float(f"{v:.6g}") if isfinite(v) else None for v in values.tolist()]
