"""What a trial has reached: read from its event log, as the trial wrote it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from shoal.report.events import last_pass, read_events
from shoal.report.folder import events_path

LAST_LOSSES = 10
"""Over so many of the last steps the loss is averaged: one alone is noise."""


@dataclass(frozen=True)
class Reached:
    """How far a trial is, and how good."""

    steps: int = 0
    value: float = math.nan
    losses: tuple[float, ...] = ()


def read_reached(log: Path, metric: str) -> Reached:
    """The loss, averaged over the last steps, or the last value of what the script gave to `run.log`."""
    file = events_path(log, 0)
    if not file.is_file():
        return Reached()
    events = read_events(file)
    steps = last_pass(events)
    losses = tuple(_number(event.get("loss")) for event in steps)
    if metric == "loss":
        last = losses[-LAST_LOSSES:]
        value = sum(last) / len(last) if last else math.nan
    else:
        logged: list[object] = [event["values"] for event in events if event.get("event") == "log"]
        named = [each[metric] for each in logged if isinstance(each, dict) and metric in each]
        value = _number(named[-1]) if named else math.nan
    return Reached(len(steps), value, losses)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def ranked(values: dict[str, float], mode: str) -> list[str]:
    """Names, the best first; what has no value comes last.

    >>> ranked({"a": 2.0, "b": 1.0, "c": math.nan}, "min")
    ['b', 'a', 'c']
    """
    sign = 1.0 if mode == "min" else -1.0
    return sorted(values, key=lambda name: (math.isnan(values[name]), sign * values[name], name))
