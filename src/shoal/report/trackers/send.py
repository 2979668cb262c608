"""Numbers on their way to trackers: a queue with an end, and a thread that nobody waits for.

A step puts a report into the queue and goes on: a microsecond. If a tracker is slower than training, what does not fit
is left out and counted. If it raises, that is said once, and it gets nothing more: no tracker ends a run.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from time import monotonic

from shoal.report.trackers import TABLE as TRACKERS
from shoal.report.trackers.base import Tracker
from shoal.types import StepReport, Value

Item = tuple[Mapping[str, float], int] | StepReport | threading.Event | None
QUEUE = 1024
CLOSE_SECONDS = 20.0
"""So long the end of a run waits for what is in the queue."""
STEP_SECONDS = 0.1
"""Steps that come faster are not all sent: curves need no more than ten points a second, and trackers take less."""


def tracker_names(text: str) -> list[str]:
    """The names in `trackers=`, checked.

    >>> tracker_names("tensorboard, wandb"), tracker_names("")
    (['tensorboard', 'wandb'], [])
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        TRACKERS.look_up(name)
    return list(dict.fromkeys(names))


class Sending:
    """All trackers of one run, fed from one thread."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        header: Mapping[str, object],
        table: Mapping[str, type[Tracker]] = TRACKERS,
    ) -> None:
        self._table = table
        self._names = list(names)
        self._folder = folder
        self._header = header
        self._queue: queue.Queue[Item] = queue.Queue(QUEUE)
        self._moved = monotonic()
        """When the thread took something last."""
        self._due = 0.0
        self.lost = 0
        """What did not fit into the queue."""
        self.failed: dict[str, str] = {}
        """Trackers that raised, and what."""
        self._words: list[str] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shoal-trackers", daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        """A step is done; the first of each tenth of a second is sent."""
        now = monotonic()
        if now >= self._due:
            self._due = now + STEP_SECONDS
            self._put(report)

    def words(self) -> list[str]:
        """What there is to say, once: by who runs the bar, for a thread cannot know what stderr is at the moment."""
        if not self._words:
            return self._words
        found = self._words
        self._words = []
        return found

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """What the user has measured: numbers go to trackers, text does not."""
        numbers = {name: float(v) for name, v in values.items() if not isinstance(v, str)}
        self._put(({name: value for name, value in numbers.items() if isfinite(value)}, step))

    def drain(self) -> None:
        """A loop has ended, and most often all: wait for a while until trackers have what it said."""
        reached = threading.Event()
        try:
            self._queue.put(reached, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        while self._thread.is_alive() and not reached.wait(0.1):
            if monotonic() - self._moved > CLOSE_SECONDS:
                return

    def close(self) -> None:
        """Let trackers have what waits, for a while, and end; twice is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        said = self.words()
        if self._thread.is_alive():
            said = [*said, f"trackers {', '.join(self._names)} do not end; the run ends without them"]
        elif self.lost:
            said = [*said, f"trackers were slower than training; {self.lost} of its reports were left out"]
        for text in said:
            print(f"shoal: {text}.", file=sys.stderr, flush=True)

    def _put(self, what: tuple[Mapping[str, float], int] | StepReport) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.lost += 1

    def _run(self) -> None:
        trackers = {name: made for name in self._names if (made := self._make(name)) is not None}
        # After theirs was registered, and so before it is called: wandb takes its service away at exit.
        atexit.register(self.close)
        reached = 0
        while (what := self._queue.get()) is not None:
            self._moved = monotonic()
            if isinstance(what, threading.Event):
                what.set()
                continue
            values, step = (numbers_of(what), what.number) if isinstance(what, StepReport) else what
            reached = max(reached, step)  # some trackers refuse a step that goes back
            for name, tracker in list(trackers.items()):
                try:
                    tracker.log(values, reached)
                except Exception as error:
                    del trackers[name]
                    self._fail(name, error)
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._fail(name, error)

    def _make(self, name: str) -> Tracker | None:
        kind = self._table[name]
        settings = self._header.get("settings")
        given: Mapping[str, object] = settings if isinstance(settings, dict) else {}
        facts = {key: value for key, value in self._header.items() if isinstance(value, int | float | str)}
        try:
            return kind(self._folder, self._folder.absolute().name, {**given, **facts})
        except ImportError:
            self._fail(name, f"it needs a package: pip install {kind.needs}")
        except Exception as error:
            self._fail(name, error)
        return None

    def _fail(self, name: str, error: object) -> None:
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        self.failed[name] = text
        self._words.append(f"tracker {name} gets no more of this run; {text[:300]}")


def numbers_of(report: StepReport) -> dict[str, float]:
    """What trackers see of a step."""
    found = {
        "loss": report.loss,
        "lr": report.lr,
        "samples_per_second": report.samples_per_second,
        "step_seconds": report.seconds,
        "exposed_seconds": report.exposed_seconds,
        "peak_memory": float(report.peak_memory),
        **({"grad_norm": report.grad_norm} if report.grad_norm is not None else {}),
        **report.metrics,
    }
    return {name: value for name, value in found.items() if isfinite(value)}
