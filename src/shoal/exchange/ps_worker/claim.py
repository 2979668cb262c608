"""A worker's claim: the step and the part that it has claimed, and the sums of that step."""

from __future__ import annotations

from typing import TypeAlias

from shoal.errors import ConfigError
from shoal.exchange.contract import JoinState, Tally
from shoal.exchange.ps_worker.options import PsOptions
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.protocol.ledger_answers import JoinMessage, TallyAnswer
from shoal.server.protocol.work_terms import WorkTerms

ClaimState: TypeAlias = "tuple[int, int, JoinMessage, TallyAnswer, float]"
"""Step, part, join state, tally and share: what the leader of a unit tells the others of it."""


def to_plain(state: JoinState | None) -> JoinMessage:
    """A join state as the ledger keeps it."""
    if state is None:
        return None
    by_module = [] if state.by_module is None else [float(state.by_module)]
    return [state.count_per_sample, state.loss_scale, state.good_steps, *by_module]


def from_plain(join_state: JoinMessage) -> JoinState | None:
    """The join state that running workers have left with the ledger.

    >>> from_plain(to_plain(JoinState(1.0, 2.0, 3, by_module=True)))
    JoinState(count_per_sample=1.0, loss_scale=2.0, good_steps=3, by_module=True)
    """
    if join_state is None:
        return None
    by_module = bool(join_state[3]) if len(join_state) > 3 else None
    return JoinState(float(join_state[0]), float(join_state[1]), int(join_state[2]), by_module)


class WorkClaim:
    """What this worker is doing, as the ledger knows it."""

    def __init__(self, parts: int, options: PsOptions) -> None:
        if options.tier == "host" and options.backup >= parts:
            raise ConfigError(
                f"ps(tier=host, backup={options.backup}) leaves {parts - options.backup} of {parts} hosts to wait for; "
                "backup must be less than there are hosts."
            )
        self._terms = WorkTerms(parts, options.clocks(), options.backup)
        self._weighted = options.aggregate == "weighted"
        self._stop = -1
        self.step = -1
        """The step that was claimed last; -1 before the first."""
        self.part = -1
        """The part of it that is being computed; -1: none."""
        self.closed = False
        """Whether it was this worker that brought the step to its end: one does, in every step."""
        self.join_state: JoinMessage = None
        """Join state from running workers; None where there is none yet."""
        self.tally: TallyAnswer = {}
        """The sums of the step, where its parts make one update."""
        self.mine = Tally(0.0, 0.0)
        """The loss of the part that was computed last."""
        self.share = 1.0
        """That part's share of the step."""

    def connect(self, link: Link, work: WorkerProtocol) -> None:
        """Talk to the ledger through these. Without them, a claim only follows that of its unit's leader (`adopt`)."""
        self._link = link
        self._work = work

    @property
    def together(self) -> bool:
        """Whether all parts of the step make one update."""
        return self._terms.clock(self.step).together

    def may_prefetch(self, step: int) -> bool:
        """Whether what is read now may be used in that step: the next, by the same clock, and within its bound."""
        clock = self._terms.clock(self.step)
        if (
            step != self.step + 1
            or step >= self._stop
            or self.part < 0
            or self._terms.clock(step) is not clock
        ):
            return False
        return clock.together or clock.may_begin(step, self._work.floor)

    @property
    def over(self) -> bool:
        """Whether the others have gone on from this step without this worker."""
        return "over" in self.tally

    @property
    def holds_parts(self) -> bool:
        """Whether servers must keep the parts of a step one by one until it is known which of them count."""
        return not self._terms.together or self._terms.backup > 0

    def state(self) -> ClaimState:
        """All that others of a unit must know, as a plain value."""
        return self.step, self.part, self.join_state, self.tally, self.share

    def adopt(self, state: ClaimState) -> None:
        """Be where the leader of the unit is."""
        self.step, self.part, self.join_state, self.tally, self.share = state

    def claim(self, stop: int, join_state: JoinMessage) -> bool:
        """Take the next part there is before step `stop`, or what is left to do in a step; False at the end."""
        # Before the first claim: by which clock, and how many parts a step has.
        if self._stop < 0:
            self._link.run(self._work.agree(self._terms.message()))
        self._stop = stop
        self._link.held_since = None
        while True:
            found = self._link.run(self._work.claim(stop, join_state))
            if found is None:
                return False
            self._link.held_since = self._link.now()
            self.step = found.step
            self.part = found.part
            self.join_state = found.join_state
            self.tally = {}
            self.closed = False
            # With no part to compute, this worker only helps a step to its end; it may have come too late for that.
            if self.part >= 0 or self.await_tally() or not self.over:
                return True

    def done(self, tally: Tally, expected_count: float, used: str) -> bool:
        """The part is computed, and all servers hold its gradient; True if there is another part to compute."""
        self.mine = tally
        # The learning rate of an update that holds only this part, see `Trained.step`.
        self.share = tally.count / expected_count if self._weighted else 1 / self._terms.parts
        if not self.together:
            return False
        self._say_done(used)
        return self.await_tally()

    def await_tally(self) -> bool:
        """Until the step is complete; True if a part of it has become free, which this worker has now."""
        self._link.held_since = None  # to wait is not to hold anything up
        found = self._link.run(self._work.tally(self.step))
        self.part = found.get("part", -1)
        if self.part >= 0:
            self._link.held_since = self._link.now()
            return True
        self.tally = found
        return False

    def named_parts(self) -> list[list[float]]:
        """The parts of the update, each with its count."""
        if self.together:
            return self.tally["parts"]
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
