"""A worker's turn: the step and the part that it has claimed, and how that step came out."""

from __future__ import annotations

from typing import Any

from shoal.clock import make_clocks
from shoal.clock.base import Clock
from shoal.errors import ConfigError
from shoal.exchange.base import Tally
from shoal.exchange.ps_options import PsOptions
from shoal.server.link import Link
from shoal.server.work import Work


class Turn:
    """What this worker is doing, as the ledger knows it."""

    def __init__(self, parts: int, options: PsOptions) -> None:
        self._parts, self._options = parts, options
        if options.tier == "host" and options.backup >= parts:
            raise ConfigError(
                f"ps(tier=host, backup={options.backup}) leaves {parts - options.backup} of {parts} hosts to wait for; "
                "backup must be less than there are hosts."
            )
        self._clocks = make_clocks(options.clock, options.ssp, options.then, options.after)
        self._stop = -1
        self.step = -1
        """The step that was claimed last; -1 before the first."""
        self.part = -1
        """The part of it that is being computed; -1: none."""
        self.closed = False
        """Whether it was this worker that brought the step to its end: one does, in every step."""
        self.memo: Any = None
        """What those who were here before want to be known."""
        self.tally: dict[str, Any] = {}
        """What the step came to, where its parts go together."""
        self.mine = Tally(0.0, 0.0)
        """What the part computed last came to."""
        self.share = 1.0
        """That part's share of the step."""

    def connect(self, link: Link, work: Work) -> None:
        """Talk to the ledger through these. Without them, a turn only follows another's."""
        self._link, self._work = link, work

    @property
    def together(self) -> bool:
        """Whether all parts of the step make one update."""
        return self._clock(self.step).together

    def foresees(self, step: int) -> bool:
        """Whether what is read now may be used in that step: the next, by the same clock, and within its bound."""
        clock = self._clock(self.step)
        if step != self.step + 1 or step >= self._stop or self.part < 0 or self._clock(step) is not clock:
            return False
        return clock.together or clock.window < 0 or self._work.floor >= step - clock.window

    def _clock(self, step: int) -> Clock:
        return [clock for begin, clock in self._clocks if begin <= step][-1]

    @property
    def over(self) -> bool:
        """Whether the others have gone on from this step without this worker."""
        return "over" in self.tally

    @property
    def holds_parts(self) -> bool:
        """Whether servers must keep the parts of a step apart until they are told which of them count."""
        return any(not clock.together for _, clock in self._clocks) or self._options.backup > 0

    def state(self) -> list[Any]:
        """All that others of a unit must know, as a plain value."""
        return [self.step, self.part, self.memo, self.tally, self.share]

    def adopt(self, state: list[Any]) -> None:
        """Be where the leader of the unit is."""
        self.step, self.part, self.memo, self.tally, self.share = state

    def claim(self, stop: int, memo: Any) -> bool:
        """Take the next part there is before step `stop`, or what is left to do in a step; False at the end."""
        if self._stop < 0:
            windows = [[begin, clock.window, int(clock.together)] for begin, clock in self._clocks]
            terms = {"parts": self._parts, "windows": windows, "backup": self._options.backup}
            self._link.run(self._work.agree(terms))
        self._stop = stop
        self._link.held_since = None
        while True:
            found = self._link.run(self._work.claim(stop, memo))
            if found is None:
                return False
            self._link.held_since = self._link.now()
            self.step, self.part, self.memo, self.tally = found.step, found.part, found.memo, {}
            self.closed = False
            # With no part to compute, this worker only helps a step to its end; it may have come too late for that.
            if self.part >= 0 or self.await_tally() or not self.over:
                return True

    def done(self, tally: Tally, foreseen: float, used: str) -> bool:
        """The part is computed, and all servers hold its gradient; True if there is another part to compute."""
        self.mine = tally
        weighted = self._options.aggregate == "weighted"
        self.share = tally.count / foreseen if weighted else 1 / self._parts
        if not self.together:
            return False
        self._say_done(used)
        return self.await_tally()

    def await_tally(self) -> bool:
        """Until the step is complete; True if a part of it has become free, which this worker has now."""
        self._link.held_since = None  # to wait is not to hold anything up
        found = self._link.run(self._work.tally(self.step))
        self.part = int(found.get("part", -1))
        if self.part >= 0:
            self._link.held_since = self._link.now()
            return True
        self.tally = found
        return False

    def named_parts(self) -> list[list[float]]:
        """The parts of the update, each with its count."""
        if self.together:
            parts: list[list[float]] = self.tally["parts"]
            return parts
        return [[self.part, self.mine.count]]

    def close(self, used: str) -> None:
        """The update is made, or dropped."""
        if self.together:
            self._work.applied(self.step)
        else:
            self.closed = self._say_done(used)
        self._link.held_since = None

    def _say_done(self, used: str) -> bool:
        """Whether the step is complete with this part."""
        claim = (self.step, self.part)
        said = self._link.run(self._work.done(claim, self.mine.total, self.mine.count, used))
        return bool(said.get("complete"))
