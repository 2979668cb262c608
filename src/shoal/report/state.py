"""What a rank is doing, in a small file of its own: for `shoal status`, while it runs and after it died.

The training loop only stores into its progress page, as it does anyway. A thread looks there once a second and replaces
the file whole, so that a reader never sees half of one. It tells what the page says and since when, not that the rank
is well: a loop that hangs has an old `since`, in a file that is new.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median_low
from time import monotonic, time

import psutil

from shoal.report.folder import ranks_in, state_path
from shoal.report.meter import peak_memory
from shoal.report.schema import SCHEMA
from shoal.types import StepReport
from shoal.world.progress_page import ProgressPage

WRITE_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""A file that is older says nothing any more about now."""
SLOWEST_SECONDS = 3.0
SLOW_RATIO = 1.2
LARGEST = 64 << 10
"""Bytes; a file that is longer is none of ours."""


@dataclass(frozen=True)
class RankState:
    """One rank, as its file says it; times are seconds since 1970 on its own host."""

    rank: int = 0
    workers: int = 0
    host: str = ""
    pid: int = 0
    born: float = 0.0
    """When the process was started: tells it from a later one with the same number."""
    device: str = ""
    strategy: str = ""
    state: str = "running"
    """running, ended or failed, by its own word."""
    why: str = ""
    step: int = 0
    """The step that was begun last."""
    steps: int | None = None
    """How many there will be."""
    doing: str = ""
    """As `shoal run` would say it: "step 7, forward and backward"."""
    phase: str = ""
    since: float = 0.0
    written: float = 0.0
    loss: float | None = None
    samples_per_second: float = 0.0
    """Of the whole job."""
    seconds: float = 0.0
    """A step's, lately."""
    busy: float = 0.0
    """Of these, those in which nobody was waited for, with what lies between two steps."""
    memory: int = 0
    peak_memory: int = 0
    saved: int = 0
    """The step of the newest checkpoint."""

    def condition(self, now: float, here: str = "") -> str:
        """running, ended or failed; "dead" without a last word; "silent" where nobody here can tell.

        `here`: the name of this host, on which its process can be looked for.
        """
        if self.state != "running":
            return self.state
        if here == self.host:
            return "running" if _lives(self.pid, self.born) else "dead"
        return "silent" if now - self.written > SILENT_SECONDS else "running"


def _lives(pid: int, born: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(abs(process.create_time() - born) < 2.0 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class StateFile:
    """Keeps the file of one rank up to date."""

    def __init__(self, folder: Path, rank: int, workers: int, page: ProgressPage, device: str = "") -> None:
        """Nothing is written before `begin`, or before a second is over: a refusal leaves no file behind."""
        self._path = state_path(folder, rank)
        self._page = page
        self._process = psutil.Process()
        self._facts: dict[str, object] = {
            "schema": SCHEMA,
            "rank": rank,
            "workers": workers,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "born": self._process.create_time(),
            "device": device,
        }
        self.last: StepReport | None = None
        """The newest step."""
        self.slowest = ""
        """On the first rank: who is slow, in words."""
        self._waited = 0.0
        self._seen = (0, monotonic(), 0.0)
        self._seconds = 0.0
        self._busy = 0.0
        self._looked = monotonic()
        self._end = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="shoal-state", daemon=True)
        self._thread.start()

    def begin(self, facts: Mapping[str, object]) -> None:
        """Training begins; `facts`: strategy, steps."""
        self._facts |= {**facts, "state": "running", "why": ""}
        self._write()

    def step(self, report: StepReport) -> None:
        """A step is done; the thread makes of it what there is to say."""
        self.last = report
        self._waited += report.exposed_seconds

    def end(self, state: str, why: str) -> None:
        """The last word of this loop, written at once; another may begin."""
        self._facts |= {"state": state, "why": why}
        self._write()

    def close(self) -> None:
        """The process ends: no more is written."""
        self._end.set()

    def _keep(self) -> None:
        while not self._end.wait(WRITE_SECONDS):
            self._write()
            if self._facts["rank"] == 0 and monotonic() - self._looked > SLOWEST_SECONDS:
                self._looked = monotonic()
                self.slowest = slowest_of(read_states(self._path.parent))

    def _write(self) -> None:
        if os.getpid() != self._facts["pid"]:
            return  # a loader process that was forked has no state of its own
        with self._writing, suppress(OSError):  # a full disk ends no run; the next second tries again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f".{self._path.name}.new")
            new.write_text(json.dumps({**self._facts, **self._now()}) + "\n")
            os.replace(new, self._path)

    def _now(self) -> dict[str, object]:
        place, last, now, wall = self._page.read(), self.last, monotonic(), time()
        steps, at, waited = self._seen
        if place.step > steps and now - at >= WRITE_SECONDS / 2:
            self._seconds = (now - at) / (place.step - steps)
            self._busy = max(0.0, now - at - (self._waited - waited)) / (place.step - steps) if steps else 0.0
            self._seen = (place.step, now, self._waited)
        found: dict[str, object] = {
            "step": place.step,
            "doing": str(place),
            "phase": place.phase.name.lower(),
            "since": round(wall - max(0.0, now - place.since), 3) if place.since else wall,
            "written": round(wall, 3),
            "memory": (memory := self._process.memory_info().rss),
            "peak_memory": max(peak_memory(), memory),  # the kernel counts the peak in larger steps
            "saved": place.saved,
        }
        if last is not None:
            finite = last.loss == last.loss and abs(last.loss) != float("inf")
            seconds = self._seconds or last.seconds  # of a second of steps: one alone says little
            rate = round(last.samples / seconds, 3) if seconds else 0.0
            found |= {"loss": last.loss if finite else None, "seconds": seconds, "samples_per_second": rate}
            found["busy"] = self._busy
        return found


def read_state(path: Path) -> RankState | None:
    """What a file says; None where it is not one of ours. Fields of another type are left at their defaults."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        given = json.loads(text) if len(text) <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    kinds = {f.name: type(getattr(RankState, f.name)) for f in fields(RankState)}
    fits = {name: given[name] for name, kind in kinds.items() if name in given and _fits(given[name], kind)}
    return RankState(**fits)


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is float or kind is type(None):
        return isinstance(value, int | float) and abs(value) < 1e300
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) >= 1 << 63)


def slowest_of(states: Sequence[RankState]) -> str:
    """Who is slow beside the median rank, in words; empty where nobody is, or where there is one rank only.

    >>> slowest_of([RankState(0, busy=0.1), RankState(1, busy=0.1), RankState(2, busy=0.15)])
    'rank 2 slow: 1.5x'
    """
    busy = [(state.busy, state.rank) for state in states if state.state == "running" and state.busy > 0]
    if len(busy) < 2:
        return ""
    # Of two, the lower: else the slower of two ranks would be compared with itself.
    median = median_low([seconds for seconds, _ in busy])
    worst, rank = max(busy)
    return f"rank {rank} slow: {worst / median:.1f}x" if worst > SLOW_RATIO * median else ""


def read_states(folder: Path) -> list[RankState]:
    """Every rank that has a state there, in order.

    >>> read_states(Path("no such folder"))
    []
    """
    found = [read_state(state_path(folder, rank)) for rank in ranks_in(folder)]
    return [state for state in found if state is not None]
