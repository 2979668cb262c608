"""Where a run says how it is doing: the progress bar of rank 0; the event log, spans and state file of every rank."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic

from shoal.errors import ConfigError
from shoal.report.console import Console
from shoal.report.events import EventLog
from shoal.report.folder import events_path, spans_path
from shoal.report.meter import Meter
from shoal.report.servers import describe_servers
from shoal.report.spans import SpanKind
from shoal.report.state import StateFile
from shoal.report.trackers.send import Sending, tracker_names
from shoal.types import StepReport, Value

SERVERS_SECONDS = 10.0

Header = Mapping[str, object]


class Journal:
    """The bar, the log and the spans of one rank; open while it trains."""

    def __init__(
        self,
        folder: Path | None,
        header: Header,
        bar: bool,
        meter: Meter,
        state: StateFile | None,
        trackers: str = "",
    ) -> None:
        """`folder`: of the event logs; None writes none. `header`: begins the log, and says which rank this is."""
        self._rank = rank = int(str(header.get("rank", 0)))
        self._path = events_path(folder, rank) if folder is not None else None
        self._spans_path = spans_path(folder, rank) if folder is not None else None
        self._header = header
        self._first = rank == 0
        self._shows = bar and self._first
        self._spans = meter.spans
        self._page = meter.page
        self._state = state
        self._console: Console | None = None
        self._events: EventLog | None = None
        self._noted = 0.0
        self._sending: Sending | None = None
        names = tracker_names(trackers) if self._first else []
        if names and folder is not None:
            self._sending = Sending(names, folder, header)
            weakref.finalize(self, self._sending.close)  # at exit too: a script may log after its loop

    def open(self, total: int | None) -> None:
        """Training begins, or goes on, towards so many steps."""
        self._console = Console(total, str(self._header["strategy"])) if self._shows else None
        if self._path is not None and self._spans_path is not None:
            self._events = EventLog.open(self._path, {**self._header, "steps": total})
            self._spans.open(self._spans_path, self._rank)
            self._page.logs(str(self._path.parent.absolute()))
        if self._state is not None:
            self._state.begin({"strategy": self._header["strategy"], "steps": total})
        self._noted = monotonic()

    def step(self, report: StepReport) -> None:
        """A step is done."""
        if self._state is not None:
            self._state.step(report)
        if self._console is not None:
            if self._state is not None:
                self._console.slowest = self._state.slowest
            self._console.update(report)
        if self._sending is not None:
            self._sending.step(report)
            for text in self._sending.words():
                self.say(text)
        if self._events is not None and self._events.write(report):
            self._spans.flush()

    def saving(self, step: int) -> AbstractContextManager[None]:
        """Around the part of a checkpoint that training waits for."""
        self.note("checkpoint", {"after": step, "name": f"step-{step}"})
        return self._spans.during(SpanKind.CHECKPOINT)

    def recovered(self, begin: float, end: float) -> None:
        """Between these moments of the monotonic clock a loss was made good."""
        if 0 < begin < end:
            self._spans.add(SpanKind.RECOVERY, int(begin * 1e9), int(end * 1e9))

    def change(self, text: str, facts: Mapping[str, object]) -> None:
        """From now on workers get other shares."""
        if self._console is not None:
            self._console.note(text)
        self.note("shares", facts)

    def note(self, event: str, facts: Mapping[str, object]) -> None:
        """Something that happened to the job, for the first rank's log."""
        if self._events is not None and self._first:
            self._events.note(event, facts)
            self._spans.flush()  # what writes the log puts off the next time that both are written

    def flush(self) -> None:
        """Write down what waits."""
        if self._events is not None:
            self._events.flush()
            self._spans.flush()

    def servers(self, ask: Callable[[], dict[str, object]], last: bool = False) -> None:
        """Every few seconds, write down how the servers are doing; the last time, say it too."""
        if self._events is not None and self._first:
            now = monotonic()
            if last or now - self._noted >= SERVERS_SECONDS:
                self._noted = now
                if facts := ask():
                    self.note("servers", facts)
        if last and self._console is not None and (facts := ask()):
            self._console.note(describe_servers(facts))

    def tell(self, event: str, facts: Mapping[str, object], text: str) -> None:
        """An event of rank 0's log, and what is said of it, if anything."""
        if self._first:
            self.note(event, facts)
        if text and self._console is not None:
            self._console.note(f"shoal: {text}.")
        elif text and self._first:
            print(f"shoal: {text}.", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """One sentence for the user, above the bar."""
        if self._console is not None:
            self._console.note(f"shoal: {text}.")
            self.note("note", {"text": text})
        elif self._first:
            print(f"shoal: {text}.", file=sys.stderr, flush=True)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """What the user has measured after so many steps; a line of its own in the log."""
        if not self._first:
            return
        if self._console is not None:
            self._console.values = {**self._console.values, **values}
        if self._sending is not None:
            self._sending.log(step, values)
        if self._path is None:
            return
        # JSON has no NaN.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        facts = {"after": step, "values": plain}
        if self._events is not None:
            self.note("log", facts)
            return
        with EventLog(self._path) as events:  # before the first step, or after the last
            events.note("log", facts)

    def close(self, step: int = 0) -> None:
        """Training is over, for now, after so many steps; the exception under way, if there is one, says why."""
        why, error = ending(sys.exception())
        if self._sending is not None:
            self._sending.drain()
            for text in self._sending.words():
                self.say(text)
        if self._events is not None:
            self._events.note("end", {"why": why, "after": step, **({"error": error} if error else {})})
        if self._state is not None:
            self._state.end("failed" if error else "ended", error or why)
        for shown in (self._console, self._events):
            if shown is not None:
                shown.close()
        self._spans.close()
        self._console = None
        self._events = None


def ending(error: BaseException | None) -> tuple[str, str]:
    """Why training stops, in a word, and what went wrong, in a sentence.

    >>> ending(None), ending(ValueError("no such file"))
    (('done', ''), ('failed', 'ValueError: no such file'))
    """
    if error is None:
        return "done", ""
    if isinstance(error, GeneratorExit):
        return "left", ""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "stopped", ""
    return "failed", f"{type(error).__name__}: {error}"[:2000]


def check_values(values: Mapping[str, object]) -> dict[str, Value]:
    """What `run.log` takes: plain values by name, numbers out of tensors.

    >>> check_values({"val_loss": 0.5, "note": "warm"})
    {'val_loss': 0.5, 'note': 'warm'}
    """
    found: dict[str, Value] = {}
    for name, given in values.items():
        value = (
            given.item() if hasattr(given, "item") and getattr(given, "numel", lambda: 1)() == 1 else given
        )
        if not isinstance(name, str) or not isinstance(value, int | float | bool | str):
            raise ConfigError(
                f"run.log: {name!r} is {type(given).__name__}; give names with numbers or text, such as "
                "run.log({'val_loss': 0.5})."
            )
        found[name] = value
    return found
