"""Where a run says how it is doing: the progress bar and the event log. Only rank 0 has either."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

from shoal.errors import ConfigError
from shoal.report.console import Console
from shoal.report.events import EventLog
from shoal.report.servers import describe_servers
from shoal.types import StepReport, Value

SERVERS_SECONDS = 10.0

Header = Mapping[str, str | int | float]


class Journal:
    """The bar and the log of one run; open while it trains."""

    def __init__(self, folder: Path | None, header: Header, bar: bool, first: bool) -> None:
        """`folder`: of events.jsonl; None writes none. `first`: whether this is rank 0."""
        self._path = folder / "events.jsonl" if folder is not None and first else None
        self._header = header
        self._shows = bar and first
        self._first = first
        self._console: Console | None = None
        self._events: EventLog | None = None
        self._noted = 0.0

    def open(self, total: int | None) -> None:
        """Training begins, or goes on, towards so many steps."""
        self._console = Console(total, str(self._header["strategy"])) if self._shows else None
        self._events = EventLog.open(self._path, self._header) if self._path else None
        self._noted = monotonic()

    def step(self, report: StepReport) -> None:
        """A step is done."""
        if self._console is not None:
            self._console.update(report)
        if self._events is not None:
            self._events.write(report)

    def change(self, text: str, facts: Mapping[str, object]) -> None:
        """From now on workers get other shares."""
        if self._console is not None:
            self._console.note(text)
        if self._events is not None:
            self._events.note("shares", facts)

    def servers(self, ask: Callable[[], dict[str, object]], last: bool = False) -> None:
        """Every few seconds, write down how the servers are doing; the last time, say it too."""
        if self._events is not None:
            now = monotonic()
            if last or now - self._noted >= SERVERS_SECONDS:
                self._noted = now
                if facts := ask():
                    self._events.note("servers", facts)
        if last and self._console is not None and (facts := ask()):
            self._console.note(describe_servers(facts))

    def say(self, text: str) -> None:
        """One sentence for the user, above the bar."""
        if self._console is not None:
            self._console.note(f"shoal: {text}.")
        elif self._first:
            print(f"shoal: {text}.", file=sys.stderr, flush=True)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """What the user has measured after so many steps; a line of its own in the log."""
        if self._path is None:
            return
        # JSON has no NaN.
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        facts = {"after": step, "values": plain}
        if self._events is not None:
            self._events.note("log", facts)
            return
        with EventLog(self._path) as events:  # before the first step, or after the last
            events.note("log", facts)

    def close(self) -> None:
        """Training is over, for now."""
        for shown in (self._console, self._events):
            if shown is not None:
                shown.close()
        self._console = None
        self._events = None


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
