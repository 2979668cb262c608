"""Workers that do not move: found by what their training loops write down, named in a sentence, ended at last.

A worker that hangs makes all others wait in the step's collectives, so most of those that do not move are its victims.
The culprit is the one that is stopped, or whose Python stack is not in code that waits for others.

| a worker has been still | it is said after | it is taken for lost after |
|---|---|---|
| stopped by a signal, anywhere | 10 s | `--hang-limit` |
| in forward, backward or update, its loop's first step apart | 10 s, or 3 times its usual step | `--hang-limit` |
| loading data or compiling, in such a step | the same | never |
| anywhere, while others wait for it in such a step | the same | never |
| in the first step, evaluation, saving, the script's own code | 60 s, or 3 times its longest | never |
| before its `Run`, or after its last step | never | never |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.cluster import stacks
from shoal.cluster.process_state import stopped_by
from shoal.cluster.report import loss_at, resume
from shoal.errors import WorkerFailed
from shoal.world.progress_page import Phase, Place, ProgressPage

LOOK_SECONDS = 1.0
TELL_SECONDS = 10.0
"""The least time after which it is said that a worker does not move."""
USUAL_STEPS = 3.0
LONG_SECONDS = 60.0
"""The same in phases that may take long."""
HANG_SECONDS = 300.0
"""After it a hung worker is taken for lost, unless `--hang-limit` says otherwise or little is lost by it."""
EXIT_CODE = 4
HangLimit = Callable[[float], float]
"""The seconds, as they are now, for a worker of which so many may pass with nothing wrong."""


@dataclass
class Watched:
    """One worker, as this file sees it."""

    rank: int
    pid: int
    page: ProgressPage
    place: Place = field(default_factory=Place)
    still: float = 0.0
    """Seconds since it moved."""
    stopped: str = ""
    """What has stopped it; empty if it runs."""
    asked: float = -1.0
    """Since when it had not moved when its stack was asked for."""
    stack: stacks.Stack | None = None
    told: float = -1.0
    """Since when it had not moved when that was said."""

    @property
    def limit(self) -> float:
        """The seconds after which it is worth a word."""
        if _may_hang(self.place):
            return max(TELL_SECONDS, USUAL_STEPS * self.place.usual)
        if self.place.phase in (Phase.STARTING, Phase.ENDED):
            return math.inf
        return max(LONG_SECONDS, USUAL_STEPS * self.place.longest)

    @property
    def hangs(self) -> bool:
        """Whether what it does cannot be meant to take so long."""
        if self.stopped:
            return True
        stack = self.stack
        busy = self.place.phase == Phase.DATA or (stack is not None and (stack.compiles or stack.debugs))
        return _may_hang(self.place) and not busy

    def look(self, excused: float) -> None:
        """Read its page; `excused`: until when nobody could have moved."""
        place = self.page.read()
        if place.since != self.place.since:
            self.stack = None
        self.place = place
        self.still = time.monotonic() - max(place.since, excused)
        self.stopped = stopped_by(self.pid) if self.still > TELL_SECONDS else ""


def _may_hang(place: Place) -> bool:
    return place.phase.in_step and place.done > 0


class Stalls:
    """Looks at the workers of this host, about once a second."""

    def __init__(
        self, folder: str, size: int, host: str, hang_limit: HangLimit, say: Callable[[str], None]
    ) -> None:
        """`hang_limit`: seconds after which a hung worker ends the run; 0: it never does."""
        self._folder = folder
        self._size = size
        self._host = host
        self._limit = hang_limit
        self._say = say
        self._workers: dict[int, Watched] = {}
        self._looked = time.monotonic()
        self._excused = 0.0
        """When this process was last found to have been stopped itself: the workers were too, most likely."""
        self._all_wait = False

    def add(self, rank: int, pid: int, page: ProgressPage) -> None:
        """Watch one more worker."""
        self._workers[rank] = Watched(rank, pid, page)

    def remove(self, rank: int) -> None:
        """It has ended."""
        self._workers.pop(rank, None)

    def look(self, alone: bool) -> None:
        """Say who does not move; raises `WorkerFailed` where the run has to end. `alone`: nobody waits for another."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS / 2:
            return
        if now - self._looked > 5 * LOOK_SECONDS:
            self._excused = now
        self._looked = now
        for one in self._workers.values():
            one.look(self._excused)
            if one.told >= 0 and one.place.since != one.told:
                one.told = -1.0
                self._say(f"{self._name(one)} goes on: {one.place}.")
        guilty = self._culprits()
        fresh = [one for one in guilty if one.told != one.place.since]
        for one in fresh:
            one.told = one.place.since
        if fresh:
            self._say(self._sentence(fresh, guilty))
        hung = [one for one in guilty if one.hangs and one.still > self._hang_limit(one) > 0]
        if hung and (not alone or len(hung) == len(self._workers)):
            raise self._failure(hung[0])

    def _hang_limit(self, one: Watched) -> float:
        return self._limit(USUAL_STEPS * one.place.usual)

    def dispensable(self) -> list[int]:
        """Workers that hang, where all that was to be done is done by others."""
        return [
            one.rank
            for one in self._workers.values()
            if (one.stopped or one.still > min(one.limit, self._hang_limit(one) or one.limit))
            and (one.hangs or one.still > self._hang_limit(one) > 0)
        ]

    def _culprits(self) -> list[Watched]:
        """Who is the reason why there is no progress; nobody where there is, or where it is not known yet."""
        self._all_wait = False
        quiet = [one for one in self._workers.values() if one.still > TELL_SECONDS]
        stopped = [one for one in quiet if one.stopped]
        if stopped or not any(one.still > one.limit for one in quiet):
            return stopped
        # Whoever is in a phase that may take long is not late itself, but others may be waiting for it.
        able = [
            one for one in quiet if one.place.phase != Phase.STARTING
        ]  # before that, the signal would kill it
        new = [one for one in able if one.asked != one.place.since]
        for one in new:
            one.asked = one.place.since
            stacks.ask(one.pid, self._folder, one.rank)
        if new:
            return []  # they answer before the next look
        for one in able:
            one.stack = one.stack or stacks.read(self._folder, one.rank)
        found = [one for one in quiet if one.stack is None or not one.stack.waits]
        if not found and len(quiet) == len(self._workers):
            self._all_wait = True
            least = min(one.place.step for one in quiet)
            found = [one for one in quiet if one.place.step == least and one.still > one.limit]
        return found

    def _sentence(self, fresh: list[Watched], guilty: list[Watched]) -> str:
        first = fresh[0]
        others = [
            one.rank for one in self._workers.values() if one not in guilty and one.still > TELL_SECONDS
        ]
        have = "has" if len(fresh) == 1 else "have"
        said = f"{self._names(fresh)} {have} not moved for {first.still:.0f} s: {first.place}"
        if first.place.usual and first.place.phase.in_step:
            said += f" (a step takes {first.place.usual:.2g} s at most)"
        said += "."
        if others:
            waits = "waits" if len(others) == 1 else "wait"
            said += f" Worker{'s' if len(others) > 1 else ''} {_listed(others)} {waits}."
        if self._all_wait:
            said += " All workers of this host wait for others: for those of another host, or for different things."
        said += self._remedy(first)
        return f"{said}\n{first.stack}" if first.stack is not None else said

    def _remedy(self, one: Watched) -> str:
        if one.stopped:
            said = f" It is stopped by {one.stopped}: `kill -CONT {one.pid}` lets it go on."
        elif one.stack is not None and one.stack.compiles:
            return " It compiles, and is waited for."
        elif one.hangs:
            said = " If that is not meant to take so long, Ctrl-C ends the run."
        else:
            return " It is waited for; Ctrl-C ends the run."
        if limit := self._hang_limit(one):
            said += f" If it does not move, it is taken for lost after {limit:.0f} s (--hang-limit)."
        return said

    def _failure(self, one: Watched) -> WorkerFailed:
        what = f"is stopped by {one.stopped}" if one.stopped else "hangs"
        said = f"{self._name(one)} {what}, for {one.still:.0f} s now: {one.place}. "
        said += "--hang-limit says how long that may be (0: for ever)."
        remedy = resume(one.place, [each.place for each in self._workers.values()])
        stacks = self._stacks(one)
        cause = "SIGSTOP" if one.stopped else "a hang"
        loss = loss_at(one.place, said + stacks, one.rank, one.pid, cause)
        return WorkerFailed(f"{said} {remedy}".rstrip() + stacks, EXIT_CODE, loss=loss)

    def _stacks(self, first: Watched) -> str:
        """Where each worker is in its Python code, as far as it has answered; the one that hangs first."""
        others = [one for one in self._workers.values() if one is not first and one.stack is not None]
        said = f"\n{first.stack}" if first.stack is not None else ""
        return said + "".join(f"\nworker {one.rank}, {one.place}:\n{one.stack}" for one in others)

    def _name(self, one: Watched) -> str:
        return f"worker {one.rank} of {self._size} (host {self._host}, pid {one.pid})"

    def _names(self, several: list[Watched]) -> str:
        if len(several) == 1:
            return self._name(several[0])
        return f"workers {_listed([one.rank for one in several])} of {self._size} (host {self._host})"


def _listed(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"
