"""How far a worker is, in a page of memory that it shares with its launcher.

A thread that says "I am alive" lives on while training hangs. So the training loop itself writes down what it does:
step, phase, and since when. That is a few stores into shared memory a step, and no system call. The launcher reads the
page; where no launcher of ours watches (`python`, torchrun), the page belongs to the worker alone.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from math import floor, log2
from time import monotonic

BYTES = 8192
_PHASE = 0
_SINCE = 1
_STEP = 2
_DONE = 3
_SAVED = 4
_BACK = 5
_ASKED = 6
_LONGEST = 8
"""The longest time in each phase so far, as far as it was long at all."""
_HISTOGRAM = 32
_BUCKETS = 192
_PER_OCTAVE = 4
_MIDDLE = _BUCKETS // 2
_FOLDER = 2048
_CALL = 3072
_LOG = 4096
_SAMPLES = 5120
_PLAN = 6144
_TEXT = 1000
_LONG_SECONDS = 10.0
_MOST = 2.0**53
"""Above it not every whole number is one of these."""


class Phase(IntEnum):
    """What a worker is doing."""

    STARTING = 0
    BUILDING = 1
    DATA = 2
    COMPUTING = 3
    EXCHANGING = 4
    BETWEEN = 5
    CALL = 6
    SAVING = 7
    ENDED = 8

    @property
    def in_step(self) -> bool:
        """Whether it belongs to a training step."""
        return self in (Phase.DATA, Phase.COMPUTING, Phase.EXCHANGING)


_WORDS = {
    Phase.STARTING: "before its shoal.Run",
    Phase.BUILDING: "in shoal.Run, before the first step",
    Phase.DATA: "step {step}, loading data",
    Phase.COMPUTING: "step {step}, forward and backward",
    Phase.EXCHANGING: "step {step}, gradients and update",
    Phase.BETWEEN: "after step {step}, in the script's own code",
    Phase.CALL: "after step {step}, in {call}",
    Phase.SAVING: "after step {step}, saving a checkpoint",
    Phase.ENDED: "after its last step, {step}",
}


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    >>> print(Place(Phase.COMPUTING, since=12.5, step=7))
    step 7, forward and backward
    """

    phase: Phase = Phase.STARTING
    since: float = 0.0
    """When the phase began, on the clock that all processes of a host share (CLOCK_MONOTONIC)."""
    step: int = 0
    """The step that was begun last, counted from 1; 0 before the first."""
    done: int = 0
    """Steps that this `run.steps` has completed; the first is slower than the others."""
    saved: int = 0
    """The step of the newest checkpoint of this run; 0 if there is none."""
    folder: str = ""
    """Where the run keeps its checkpoints; empty if it keeps none."""
    log: str = ""
    """Where the run keeps its event logs; empty if it keeps none."""
    call: str = ""
    plan: str = ""
    """The strategy, once it is known."""
    samples: str = ""
    """Those of the step that was under way when a worker was lost before; empty at any other."""
    usual: float = 0.0
    """99 of 100 steps took no longer than this many seconds; 0 if no step but the first is done."""
    longest: float = 0.0
    """The longest that this phase has lasted before, where that was long."""

    def __str__(self) -> str:
        words = _WORDS[self.phase]
        if not self.step:
            words = words.replace("after step {step}", "before the first step")
        return words.format(step=self.step, call=self.call)


class ProgressPage:
    """Written by one worker, as it goes.

    >>> page = ProgressPage()
    >>> page.step(7)
    >>> page.enter(Phase.DATA)
    >>> print(page.read())
    step 7, loading data
    """

    __slots__ = ("_bytes", "_slots")

    def __init__(self, path: str = "") -> None:
        """`path`: the file that the launcher has made; empty: nobody else reads it."""
        memory: mmap.mmap | bytearray = bytearray(BYTES)
        if path and os.path.exists(path):
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), BYTES)
        self._bytes = memoryview(memory)
        self._slots = self._bytes.cast("d")

    @staticmethod
    def create(path: str) -> ProgressPage:
        """In the launcher: a page that a worker will find under this path."""
        with open(path, "wb") as file:
            file.truncate(BYTES)
        page = ProgressPage(path)
        page._slots[_SINCE] = monotonic()
        return page

    def enter(self, phase: Phase, now: float | None = None) -> None:
        """From now on the worker is in this phase."""
        slots = self._slots
        now = monotonic() if now is None else now
        spent = now - slots[_SINCE]
        if spent > _LONG_SECONDS:
            place = _LONGEST + int(slots[_PHASE])
            slots[place] = max(slots[place], spent)
        slots[_SINCE] = now
        slots[_PHASE] = phase

    @property
    def phase(self) -> Phase:
        """What `enter` was given last."""
        return Phase(int(self._slots[_PHASE]))

    def step(self, number: int) -> None:
        """Step `number`, counted from 1, begins, or is over with all before it."""
        self._slots[_STEP] = number

    def begin_loop(self) -> None:
        """A `run.steps` begins: its first step may compile, and the times of another loop say nothing about it."""
        self._slots[_DONE] = 0
        for bucket in range(_BUCKETS):
            self._slots[_HISTOGRAM + bucket] = 0

    def stepped(self, seconds: float) -> None:
        """A step was completed in so many seconds."""
        slots = self._slots
        if slots[_DONE]:
            bucket = floor(_PER_OCTAVE * log2(seconds)) if seconds > 0 else -_MIDDLE
            slots[_HISTOGRAM + min(max(bucket + _MIDDLE, 0), _BUCKETS - 1)] += 1
        slots[_DONE] += 1

    def keeps(self, folder: str) -> None:
        """The run keeps its checkpoints there."""
        self._write(_FOLDER, folder)

    def logs(self, folder: str) -> None:
        """The run keeps its event logs there."""
        self._write(_LOG, folder)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is on disk, or the run goes on from one."""
        self._slots[_SAVED] = max(self._slots[_SAVED], step)

    def plans(self, plan: str) -> None:
        """The run follows this strategy."""
        self._write(_PLAN, plan)

    def ask_to_yield(self) -> None:
        """In the launcher: let this worker end after a step, once it is kept in memory."""
        self._slots[_ASKED] = 1

    @property
    def is_asked_to_yield(self) -> bool:
        """Whether the launcher has asked."""
        return bool(self._slots[_ASKED])

    @property
    def back(self) -> bool:
        """Whether `is_back` was called."""
        return bool(self._slots[_BACK])

    def is_back(self) -> bool:
        """A step is done after the workers were started anew; whether it is the first."""
        first = not self._slots[_BACK]
        self._slots[_BACK] = monotonic()
        return first

    def suspects(self, samples: str) -> None:
        """This worker was lost in such a step before: what it has of it."""
        self._write(_SAMPLES, samples)

    def calls(self, what: str) -> None:
        """The worker makes a call of its run that is no step."""
        self._write(_CALL, what)
        self.enter(Phase.CALL)

    def read(self) -> Place:
        """What the page says now."""
        slots = self._slots
        # A worker that runs wild may have written anything.
        phase = Phase(min(_whole(slots[_PHASE]), Phase.ENDED))
        return Place(
            phase=phase,
            since=_finite(slots[_SINCE]),
            step=_whole(slots[_STEP]),
            done=_whole(slots[_DONE]),
            saved=_whole(slots[_SAVED]),
            folder=self._text(_FOLDER),
            log=self._text(_LOG),
            call=self._text(_CALL),
            plan=self._text(_PLAN),
            samples=self._text(_SAMPLES),
            usual=self._usual(),
            longest=_finite(slots[_LONGEST + phase]),
        )

    def _usual(self) -> float:
        """The upper end of the bucket above which at most one step in a hundred lies."""
        counts = [_finite(count) for count in self._slots[_HISTOGRAM : _HISTOGRAM + _BUCKETS].tolist()]
        above = sum(counts) / 100
        for bucket in range(_BUCKETS - 1, -1, -1):
            above -= counts[bucket]
            if above < 0:
                return float(2 ** ((bucket + 1 - _MIDDLE) / _PER_OCTAVE))
        return 0.0

    def _write(self, at: int, text: str) -> None:
        data = text.encode()[:_TEXT]
        self._bytes[at : at + _TEXT] = data.ljust(_TEXT, b"\0")

    def _text(self, at: int) -> str:
        return bytes(self._bytes[at : at + _TEXT]).rstrip(b"\0").decode(errors="replace")


def _finite(value: float) -> float:
    return value if 0.0 <= value < _MOST else 0.0


def _whole(value: float) -> int:
    return int(_finite(value))
