"""The event log: what happened in a run, one line of JSON per event, appended and never rewritten.

Each rank writes one, and so may any other process (folder.py). The first line of each start is a header; then one line
per step. Lines wait in memory for at most half a second and reach the file in one `write` of whole lines, so a
`kill -9` loses half a second of history and never leaves half a line that a later one would be glued to. What kinds of
events there are, and their fields, says schema.py.

    {"event": "start", "time": 1718000000.0, "schema": 1, "monotonic": 88.5, "host": "a", "pid": 7, "rank": 0, ...}
    {"step": 1, "epoch": 0, "loss": 5.54, "samples": 32, ..., "time": 1718000001.2}
    {"event": "servers", "time": 1718000011.0, "staleness": {"0": 80, "1": 16}, "busy": [0.12, 0.1], ...}

What is not a number (a NaN loss) is `null`, because JSON has no NaN and most readers refuse it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from time import perf_counter, time
from types import TracebackType

from shoal.errors import ConfigError
from shoal.report.schema import SCHEMA
from shoal.types import StepReport, Value

Event = dict[str, Value | None]

FLUSH_SECONDS = 0.5


class EventLog:
    """An open event log; closes as a context manager. Appends if the file exists already.

    >>> with EventLog.open("runs/first/events.jsonl", {"strategy": "ddp"}) as log:  # doctest: +SKIP
    ...     for step in run.steps(100):
    ...         log.write(step)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _cut_torn_line(self._file, self.path)
        except BaseException:
            os.close(self._file)
            raise
        self._waiting: list[tuple[StepReport, float, float]] = []
        self._before = 0.0
        """When the step before was over."""
        self._flushed = time()
        self._failed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, object]) -> EventLog:
        """Open the log at `path` and write the header of this start: rank, strategy, workers, precision, ..."""
        log = cls(path)
        log.note(
            "start", {**_here(), **header}
        )  # at once: what dies in its first step still says what it was
        return log

    def write(self, report: StepReport) -> bool:
        """Add one step; whether lines went to the file. Touches it only if the last time was half a second ago."""
        now = time()
        between = now - self._before - report.seconds
        self._before = now
        self._waiting.append((report, now, between if 0.0 < between < now / 2 else 0.0))
        if 0 <= now - self._flushed < FLUSH_SECONDS:
            return False
        self.flush()
        return True

    def note(self, event: str, facts: Mapping[str, object]) -> None:
        """Write down at once something else than a step; schema.py lists what there is."""
        self.flush()
        self._write(json.dumps({"event": event, "time": time(), **facts}, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Hand every waiting line to the operating system now."""
        # Formatting many lines in a row, with its code warm in the cache, is cheaper than one in every step.
        lines = "".join([_step_line(*waiting) for waiting in self._waiting])
        self._waiting.clear()
        self._write(lines)
        self._flushed = time()

    def _write(self, lines: str) -> None:
        waiting, size = lines.encode(), -1
        try:
            while waiting:  # one turn, unless the disk is full or a signal cut the write short
                size = os.fstat(self._file).st_size if size < 0 else size
                waiting = waiting[os.write(self._file, waiting) :]
        except OSError as error:
            # History is worth less than the run. What went in is taken back, so that the next line stands alone.
            with suppress(OSError):
                os.ftruncate(self._file, size)
            if not self._failed:
                print(
                    f"shoal: {self.path}: {error.strerror}; events are lost until that is over.",
                    file=sys.stderr,
                )
            self._failed = True

    def close(self) -> None:
        """Write what waits and close the file; closing twice is harmless."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _here() -> dict[str, object]:
    """Who writes, and the same moment on both clocks: the monotonic one is that of spans."""
    host, pid = socket.gethostname(), os.getpid()
    return {"schema": SCHEMA, "monotonic": round(perf_counter(), 6), "host": host, "pid": pid}


def _step_line(r: StepReport, now: float, between: float) -> str:
    # Written out by hand: half the time of json.dumps on the same keys, and this runs in every step.
    per_second = 1.0 / r.seconds if r.seconds > 0 else 0.0
    norm = r.grad_norm
    metrics = f'"metrics": {json.dumps(_plain(r.metrics))}, ' if r.metrics else ""
    return (
        f'{{"step": {r.number}, "epoch": {r.epoch}, "loss": {r.loss if isfinite(r.loss) else "null"}, '
        f'"samples": {r.samples}, "count": {r.count if isfinite(r.count) else "null"}, '
        f'"samples_per_second": {r.samples * per_second:.3f}, '
        f'"counts_per_second": {r.count * per_second if isfinite(r.count) else 0.0:.3f}, '
        f'"seconds": {r.seconds:.6f}, "data": {r.data_seconds:.6f}, "compute": {r.compute_seconds:.6f}, '
        f'"exposed": {r.exposed_seconds:.6f}, "update": {r.update_seconds:.6f}, '
        f'"bytes_sent": {r.bytes_sent}, "peak_memory": {r.peak_memory}, '
        f'"lr": {r.lr if isfinite(r.lr) else "null"}, '
        f'"grad_norm": {"null" if norm is None or not isfinite(norm) else norm}, '
        f'"skipped": {"true" if r.skipped else "false"}, "between": {between:.6f}, {metrics}"time": {now:.3f}}}\n'
    )


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _cut_torn_line(file: int, path: Path) -> None:
    """Remove the half line that a full disk or a power cut left at the end: the next must stand alone."""
    size = os.fstat(file).st_size
    tail = os.pread(file, 1 << 16, max(0, size - (1 << 16)))
    if not tail or tail.endswith(b"\n"):
        return
    torn = tail[tail.rfind(b"\n") + 1 :]
    # Cutting is right only in a file of ours: never shorten something a mistyped path points to.
    if not torn.startswith(b"{"):
        raise ConfigError(f"{path} ends in {torn[-20:]!r} and is not an event log; choose another path.")
    os.ftruncate(file, size - len(torn))


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Every event in the log, in order. A last line without its end is still being written and is left out.

    >>> [event["loss"] for event in read_events("events.jsonl") if "step" in event]  # doctest: +SKIP
    [5.54, 5.31, 5.02]
    """
    whole, _, _ = Path(path).read_text(encoding="utf-8").rpartition("\n")
    events: list[Event] = []
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise ConfigError(f"line {number} of {path} is not an event: {line[:60]!r}.")
        events.append(event)
    return events


def last_pass(events: Iterable[Event]) -> list[Event]:
    """The step events without those that a resume took back, so that each step is there once, in order.

    A run killed at step 120 goes on from its checkpoint at 100. The log then holds 101 to 120 twice; the
    second time counts.

    >>> [event["loss"] for event in last_pass([{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0},
    ...                                        {"event": "start"}, {"step": 2, "loss": 4.1}])]
    [5.0, 4.1]
    """
    kept: list[tuple[int, Event]] = []
    for event in events:
        number = event.get("step")
        if isinstance(number, int) and "event" not in event:
            while kept and kept[-1][0] >= number:
                kept.pop()
            kept.append((number, event))
    return [event for _, event in kept]
