"""Reading a log that somebody writes, that was cut short, or that holds anything: what can be read is read.

`Follower` gives what is new. `Sampled` opens a log of any size by looking at a few hundred places in it, and reads in
full only the stretch that somebody asks for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from shoal.report.events import Event

LONGEST_LINE = 1 << 20
"""Bytes; what is longer is no event."""
BLOCK = 1 << 16
MOST_BYTES = 4 << 20
"""A stretch that is longer is sampled, and not read in full."""


def parse(line: bytes) -> Event | None:
    """The event of a line; None if it is none.

    >>> parse(b'{"step": 1}'), parse(b'{"step": 1'), parse(b"[1]")
    ({'step': 1}, None, None)
    """
    try:
        event = json.loads(line, parse_constant=_nothing)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _nothing(_: str) -> None:
    """NaN and Infinity are no JSON; Python would read them."""


def _number(event: Event) -> int:
    """The number of a step event; 0 of any other."""
    number = event.get("step")
    is_step = "event" not in event and isinstance(number, int) and not isinstance(number, bool)
    return int(number) if is_step and number is not None else 0


class Follower:
    """Whole lines of a file as they come. A file that was replaced or cut is read from its new beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0
        """Lines that were no events."""
        self._file: BinaryIO | None = None
        self._node = (0, 0)
        self._torn = b""

    def poll(self, most: int = 1 << 24) -> list[Event]:
        """What has come since the last time, at most so many bytes of it.

        >>> Follower(Path("no such log")).poll()
        []
        """
        events = list(self._rest(most)) if self._file is not None else []
        try:
            now = os.stat(self.path)
        except OSError:
            return events
        if self._file is None or (now.st_dev, now.st_ino) != self._node or now.st_size < self._file.tell():
            self.close()
            try:
                self._file = self.path.open("rb")
            except OSError:
                return events
            self._node = (now.st_dev, now.st_ino)
            events += self._rest(most)
        return events

    def close(self) -> None:
        """Let go of the file; `poll` would read it from its beginning."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._torn = b""

    def skip_to(self, offset: int) -> None:
        """Leave out what is before this place, which is the beginning of a line."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:
                return
            found = os.fstat(self._file.fileno())
            self._node = (found.st_dev, found.st_ino)
        self._file.seek(offset)
        self._torn = b""

    def _rest(self, most: int) -> Iterator[Event]:
        assert self._file is not None
        whole, end, self._torn = (self._torn + self._file.read(most)).rpartition(b"\n")
        if len(self._torn) > LONGEST_LINE:
            self._torn = b""
            self.bad += 1
        for line in whole.split(b"\n") if end else ():
            event = parse(line) if len(line) <= LONGEST_LINE else None
            if event is not None:
                yield event
            elif line.strip():
                self.bad += 1


@dataclass
class Place:
    """A step event and where its line begins."""

    offset: int
    step: int
    event: Event = field(repr=False)


class Sampled:
    """A log of any size, of which only some places are looked at.

    >>> Sampled(Path("no such log")).steps(1, 10)
    []
    """

    def __init__(self, path: Path, places: int = 512) -> None:
        self.path = path
        self._count = places
        self.places: list[Place] = []
        """In the order of the file: steps may go back where a run was resumed."""
        self.size = 0
        self.bytes_read = 0
        self.look()

    def look(self) -> None:
        """Take a look at places all over the file as it is now."""
        try:
            with self.path.open("rb", buffering=0) as file:
                self.size = os.fstat(file.fileno()).st_size
                self.places = list(self._sample(file, 0, self.size, self._count))
        except OSError:
            self.size = 0
            self.places = []

    def steps(self, first: int, last: int, most: int = 4096) -> list[Event]:
        """Events of the steps from `first` to `last`: all of them where they are few, else about `most` samples."""
        if not self.places:
            return []
        try:
            with self.path.open("rb", buffering=0) as file:
                found = [
                    e for low, high in self._stretches(first, last) for e in self._read(file, low, high, most)
                ]
        except OSError:
            return []
        return [event for event in found if first <= _number(event) <= last]

    def _stretches(self, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of bytes that may hold such steps."""
        ends = [place.offset for place in self.places[1:]] + [self.size]
        after = [place.step for place in self.places[1:]] + [self.places[-1].step]
        found: list[tuple[int, int]] = []
        for place, end, step in zip(self.places, ends, after, strict=True):
            open_end = end == self.size and last >= place.step
            # Between two places the run may have gone back: then the step after is lower, and anything may be there.
            inside = place.step <= last and step >= first if step >= place.step else True
            if not (inside or open_end):
                continue
            if found and found[-1][1] == place.offset:
                found[-1] = (found[-1][0], end)
            else:
                found.append((place.offset, end))
        return found

    def _read(self, file: BinaryIO, low: int, high: int, most: int) -> Iterator[Event]:
        if high - low > MOST_BYTES:
            yield from (place.event for place in self._sample(file, low, high, most))
            return
        data = os.pread(file.fileno(), high - low, low)
        self.bytes_read += len(data)
        for line in data.split(b"\n"):
            event = parse(line)
            if event is not None and _number(event) > 0:
                yield event

    def _sample(self, file: BinaryIO, low: int, high: int, count: int) -> Iterator[Place]:
        """The first whole step after each of `count` places."""
        gap = max(1, (high - low) // max(1, count))
        at, reached = low, -1
        while at < high:
            place = self._first_step(file, at, low)
            if place is not None and place.offset > reached and place.offset < high:
                reached = place.offset
                yield place
            at = max(at + gap, reached + 1)

    def _first_step(self, file: BinaryIO, at: int, low: int) -> Place | None:
        for length in (1024, BLOCK):
            data = os.pread(file.fileno(), length, at)
            self.bytes_read += len(data)
            start = 0 if at == low else data.find(b"\n") + 1
            while (end := data.find(b"\n", start)) >= 0 and (start or at == low):
                event = parse(data[start:end]) if data.startswith(b'{"step"', start) else None
                if event is not None and _number(event) > 0:
                    return Place(at + start, _number(event), event)
                start = end + 1
        return None
