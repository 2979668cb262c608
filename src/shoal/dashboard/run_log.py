"""A run's folder, read and followed: headers, steps, events and states of every rank."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from shoal.dashboard.columns import Columns, number
from shoal.errors import ConfigError
from shoal.report.events import Event
from shoal.report.folder import events_path, ranks_in, roles_in
from shoal.report.follow import Follower, Sampled
from shoal.report.state import RankState, read_states

FOLLOW_SECONDS = 0.1
LOADING_SECONDS = 1.0
"""So often the page is told how far a log has been read."""
PAUSE_SECONDS = 0.1
MOST_RANKS = 4096


class RunLog:
    """One run. Use as a context to follow it, else call `load`.

    >>> RunLog(Path("no such run"))
    Traceback (most recent call last):
    shoal.errors.ConfigError: there is no event log in no such run; give the folder of a run, as its log= says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name or str(folder)
        if not self.ranks():
            raise ConfigError(
                f"there is no event log in {folder}; give the folder of a run, as its log= says."
            )
        self.columns = Columns(events_path(folder, self.ranks()[0]))
        """Of the first rank: what is the same on all."""
        self.version = 0
        """Grows whenever there is something new."""
        self._others: dict[str, tuple[Follower, list[Event]]] = {}
        self._samples: dict[int, Sampled] = {}
        self._headers: dict[int, Event] = {}
        self.asked = 0.0
        """When somebody asked for something last."""
        self._patience = 3.0
        self._stop = threading.Event()

    def ranks(self) -> list[int]:
        """Who has written there."""
        return ranks_in(self.folder)[:MOST_RANKS]

    def load(self) -> RunLog:
        """Read all there is."""
        while self.columns.poll():
            pass
        self._poll_others()
        return self

    def __enter__(self) -> RunLog:
        self.columns.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @cached_property
    def _thread(self) -> threading.Thread:
        return threading.Thread(target=self._follow, name="shoal-page-follow", daemon=True)

    def _follow(self) -> None:
        seen: object = None
        shown = 0.0
        while not self._stop.is_set():
            self._let_others_go_first()
            fresh = self.columns.poll()
            if fresh and not self.columns.loaded and time.monotonic() - shown < LOADING_SECONDS:
                continue
            shown = time.monotonic()
            now = (self._poll_others(), [state.written for state in self.states()])
            if fresh or now != seen:
                seen = now
                self.version += 1
            if not fresh:
                self._stop.wait(FOLLOW_SECONDS)

    def _let_others_go_first(self) -> None:
        """While a long log is read, whoever asks is answered first, from samples: both cannot run at once."""
        while (
            not self.columns.loaded and self._patience > 0 and time.monotonic() - self.asked < PAUSE_SECONDS
        ):
            self._patience -= PAUSE_SECONDS
            self._stop.wait(PAUSE_SECONDS)

    def _poll_others(self) -> int:
        """Logs of the launcher and others are short: followed from their beginning."""
        for role in roles_in(self.folder):
            if role not in self._others:
                self._others[role] = (Follower(events_path(self.folder, role)), [])
        for role, (follower, events) in self._others.items():
            fresh = [{**event, "role": role} for event in follower.poll() if "event" in event]
            for event in fresh:
                self.columns.add_values_of(event)
            events += fresh
            del events[:-2000]
        return sum(len(events) for _, events in self._others.values())

    @property
    def header(self) -> Event:
        """The start event of the first rank: the newest, as far as the log has been read."""
        with self.columns.lock:
            starts = [event for event in self.columns.events if event.get("event") == "start"]
        return starts[-1] if starts else self.header_of(self.ranks()[0])

    def header_of(self, rank: int) -> Event:
        """The first start event of a rank."""
        if rank not in self._headers:
            follower = Follower(events_path(self.folder, rank))
            starts = [event for event in follower.poll(1 << 16) if event.get("event") == "start"]
            follower.close()
            if not starts:
                return {}
            self._headers[rank] = starts[0]
        return self._headers[rank]

    def events(self) -> list[Event]:
        """What happened beside steps, in order of time, each with who says it."""
        with self.columns.lock:
            own = list(self.columns.events)
        others = [event for _, events in self._others.values() for event in list(events)]
        return sorted([*own, *others], key=lambda event: number(event.get("time")))

    def clock_offset(self, rank: int) -> float:
        """Seconds to add to a rank's times; 0 where its host's clock was never compared."""
        host = self.header_of(rank).get("host")
        clocks = [
            event for event in self.events() if event.get("event") == "clock" and event.get("host") == host
        ]
        offset = number(clocks[-1].get("offset")) if clocks else 0.0
        return offset if offset == offset else 0.0

    def states(self) -> list[RankState]:
        """What each rank is doing."""
        with suppress(OSError):
            return read_states(self.folder)
        return []

    def state_rows(self) -> list[dict[str, object]]:
        """The same as plain values, with what can be told of each from here."""
        here, now = socket.gethostname(), time.time()
        return [{**asdict(state), "condition": state.condition(now, here)} for state in self.states()]

    def rank_steps(self, rank: int, first: int, last: int, most: int) -> list[Event]:
        """Steps of any rank: all, or samples where they are many."""
        sampled = self._samples.get(rank)
        path = events_path(self.folder, rank)
        try:
            size = path.stat().st_size
        except OSError:
            return []
        if sampled is None or sampled.size != size:
            sampled = self._samples[rank] = Sampled(path, 256)
        return sampled.steps(first, last, most)
