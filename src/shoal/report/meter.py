"""Where the time of one step went.

A step is a sequence of stretches, each belonging to one phase. The meter keeps only the moment of the last
mark: a mark gives the stretch since then to a phase. So a mark costs one look at the clock, phases may
alternate as often as they like (compute, wait, compute, wait), and no time is counted twice.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Literal, NamedTuple

from shoal.report.spans import SHORT_NS, SpanKind, Spans
from shoal.types import StepReport
from shoal.world import progress_page
from shoal.world.progress_page import ProgressPage

Phase = Literal["data", "compute", "exposed", "update"]

PHASES: tuple[Phase, ...] = ("data", "compute", "exposed", "update")
"""In the order in which a step meets them; `StepReport` explains each."""


class Times(NamedTuple):
    """The seconds of a step, or of many steps together, and how many of them each phase took."""

    seconds: float
    data: float
    compute: float
    exposed: float
    update: float

    @classmethod
    def of(cls, reports: Iterable[StepReport]) -> Times:
        """The times of these steps, added up."""
        rows = [
            (r.seconds, r.data_seconds, r.compute_seconds, r.exposed_seconds, r.update_seconds)
            for r in reports
        ]
        return cls(*(sum(column) for column in zip(*rows, strict=True))) if rows else cls(0, 0, 0, 0, 0)

    def shares(self) -> dict[str, float]:
        """The part of the time each phase took, and `other` for what no phase claimed. They add up to 1.

        >>> Times(seconds=2.0, data=0.0, compute=1.5, exposed=0.0, update=0.25).shares()
        {'data': 0.0, 'compute': 0.75, 'exposed': 0.0, 'update': 0.125, 'other': 0.125}
        """
        claimed = self.data + self.compute + self.exposed + self.update
        # Phases measured apart from the whole can exceed it by rounding; shares above 1 look like a bug.
        whole = max(self.seconds, claimed)
        parts = (self.data, self.compute, self.exposed, self.update, whole - claimed)
        return {name: part / whole if whole > 0 else 0.0 for name, part in zip(_NAMES, parts, strict=True)}


_NAMES = (*PHASES, "other")

_AFTER: dict[Phase, progress_page.Phase] = {
    "data": progress_page.Phase.COMPUTING,
    "compute": progress_page.Phase.EXCHANGING,
}
"""What begins where such a phase ends, as far as a watcher wants to know it."""

_KINDS: dict[Phase, int] = {
    "data": int(SpanKind.DATA),
    "compute": int(SpanKind.COMPUTE),
    "exposed": int(SpanKind.EXPOSED),
    "update": int(SpanKind.UPDATE),
}

_BETWEEN = int(SpanKind.BETWEEN)
_PEAK_NS = 20_000_000


class Meter:
    """A stopwatch with phases for one step at a time.

    >>> meter = Meter()
    >>> meter.start()
    >>> batch = list(range(1000)); meter.mark("data")
    >>> total = sum(batch); meter.mark("compute")
    >>> times = meter.stop()
    >>> times.data > 0 and times.seconds >= times.data + times.compute
    True
    """

    __slots__ = ("_begin", "_last", "_peak", "_peak_due", "_spent", "_stopped", "page", "spans")

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = spans or Spans()
        """Where each stretch is noted when it is over."""
        self._spent: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self.page = ProgressPage()
        """Where each phase is noted as it begins, for whoever watches this worker."""
        self._begin = self._last = perf_counter_ns()
        self._stopped = 0
        self._peak = 0
        self._peak_due = 0

    def start(self, step: int = 0) -> None:
        """Begin a step, counted from 1: forget the times of the one before."""
        before, stopped = self.spans.step, self._stopped
        self.spans.begin(step)
        spent = self._spent
        spent["data"] = spent["compute"] = spent["exposed"] = spent["update"] = 0
        self._begin = self._last = perf_counter_ns()
        if stopped and before < step and self._last - stopped > SHORT_NS:
            self.spans.add(_BETWEEN, stopped, self._last)
        self.page.enter(progress_page.Phase.DATA, self._last * 1e-9)

    def mark(self, phase: Phase) -> None:
        """Give the time since the previous mark, or since the start, to `phase`."""
        now, last = perf_counter_ns(), self._last
        self._spent[phase] += now - last
        self._last = now
        if now - last > SHORT_NS:
            self.spans.add(_KINDS[phase], last, now)
        after = _AFTER.get(phase)
        if after is not None:
            self.page.enter(after, now * 1e-9)

    def waited(self, nanoseconds: int) -> None:
        """So much of the stretch that `mark("compute")` will end was waiting for others, and is `exposed`."""
        self._spent["exposed"] += nanoseconds
        self._spent["compute"] -= nanoseconds

    def peak_memory(self) -> int:
        """As the function of this name, but not more often than every 20 ms."""
        if self._last >= self._peak_due:
            self._peak_due = self._last + _PEAK_NS
            self._peak = peak_memory()
        return self._peak

    def stop(self) -> Times:
        """End the step. Time after the last mark counts in `seconds` and in no phase."""
        now = perf_counter_ns()
        seconds = (now - self._begin) * 1e-9
        self._stopped = now
        self.page.stepped(seconds)
        self.page.enter(progress_page.Phase.BETWEEN, now * 1e-9)
        spent = self._spent
        return Times(
            seconds,
            spent["data"] * 1e-9,
            spent["compute"] * 1e-9,
            spent["exposed"] * 1e-9,
            spent["update"] * 1e-9,
        )


def peak_memory() -> int:
    """The highest resident memory of this process so far, in bytes.

    The kernel keeps this number anyway, so asking costs about a microsecond. On Linux it does not start from
    zero: a process inherits the peak of the one that started it, so start workers from a small launcher.

    >>> peak_memory() > 1_000_000
    True
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux and the BSDs count in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
