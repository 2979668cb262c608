"""The ledger: which part of which step is whose, what is done, and who may go on. Replicated like every shard.

The global batch of a step has as many parts as the job has workers. A worker claims a part, computes its gradient,
and reports that it is done. The ledger asks the job's clock (shoal.clock) which steps may begin:

    parts together    (bsp)              Parts of the oldest step that is not applied. Each worker has its own part, and
                                         takes another's only when that worker is lost. All parts make one update.
    each part alone   (ssp, dssp, asp)   The first free part of a step that the clock lets begin, which depends on how
                                         far it is ahead of the oldest step with a part that is not done. Every part is
                                         an update of its own.

So nobody is ever further ahead of the slowest than the clock's bound; a slow worker gets fewer parts, and a lost
worker's parts go to the others. A part is done once: a worker that comes second with it is told so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.server.ledger.open_steps import (
    FREE,
    Done,
    LedgerState,
    OpenStep,
    disagreement,
    sum_of,
)
from shoal.server.protocol.ledger_answers import (
    ClaimAnswer,
    DoneAnswer,
    JoinAnswer,
    JoinMessage,
    LedgerStatus,
    OldestAnswer,
    Parameters,
    StepSum,
    TakeAnswer,
)
from shoal.server.protocol.state_machine import Answer, Machine, Operation, Refused
from shoal.server.protocol.work_terms import WorkTerms

_RECENT = 16
"""The sums of so many finished steps are remembered, for workers that ask late."""


class Ledger(Machine):
    """The state of the whole job's work."""

    def __init__(self) -> None:
        self.terms = WorkTerms(0, ())
        """No parts: the workers have not agreed yet."""
        self.ready = False
        """Whether the shards have their first values."""
        self.oldest = 0
        """Every step before it is over: done, and applied."""
        self.steps: dict[int, OpenStep] = {}
        self.ranks: dict[int, int] = {}
        """Worker -> its rank, in the order in which workers came."""
        self.lost: set[int] = set()
        """Ranks whose worker is lost and has not come back."""
        self.join_state: JoinMessage = None
        """Join state, from the last worker that finished a step."""
        self.staleness: dict[int, int] = {}
        """Steps ahead of the oldest -> how many claims were granted that far ahead."""
        self.model: Parameters = None
        """The parameters, as the first worker has them."""
        self.recent: dict[int, StepSum] = {}
        """The sums of the last steps, for workers that ask late."""

    # Changes.

    def apply(self, op: Operation) -> Answer:
        changes: dict[str, Callable[[Operation], object]] = {
            "join": self._join,
            "begin": self._begin,
            "agree": self._agree,
            "claim": self._claim,
            "take": self._take,
            "done": self._done,
            "lost": self._lost,
        }
        if op.name not in changes:
            raise Refused(f"the ledger does not know '{op.name}'")
        return Answer(changes[op.name](op))

    def _join(self, op: Operation) -> JoinAnswer:
        """A worker has come. An earlier worker of its rank is replaced when this one makes a claim, and not before:

        this one may have ended long ago, and only its message be late.
        """
        rank = int(op.args["rank"])
        model = op.args["model"]
        if self.model is None:
            self.model = model
        if model != self.model:
            raise Refused(disagreement(self.model, model, rank))
        self.ranks.pop(op.client, None)
        for worker in self._of_rank(rank):
            self._release(worker)
        self.ranks[op.client] = rank
        self.lost.discard(rank)
        return {"ready": self.ready, "oldest": self.oldest, "join_state": self.join_state}

    def _begin(self, op: Operation) -> OldestAnswer:
        """The shards have their values, and work begins at a step."""
        if not self.ready:
            self.join_state = op.args["join_state"]
            self.oldest = op.clock
            self.ready = True
        return {"oldest": self.oldest}

    def _agree(self, op: Operation) -> OldestAnswer:
        """By which clock, and among how many, the work is done. The first worker says; the others have to agree."""
        terms = WorkTerms.of(op.args)
        if not self.terms.parts:
            self.terms = terms
        elif terms.message() != self.terms.message():
            raise Refused(
                f"workers disagree: one has {terms}, the others {self.terms}; "
                "start all with the same strategy and number of workers."
            )
        return {"oldest": self.oldest}

    def _claim(self, op: Operation) -> ClaimAnswer:
        """A part to work on. `applied`: a step whose parts went together, which all shards have applied."""
        if op.client not in self.ranks:
            raise Refused("this worker has been replaced by another of its rank")
        rank = self.ranks[op.client]
        of_rank = self._of_rank(rank)
        # Whoever claims is alive, so those of its rank that came before are not: now they are replaced.
        for worker in of_rank[: of_rank.index(op.client)]:
            del self.ranks[worker]
        self.lost.discard(rank)
        if op.args["applied"] is not None and int(op.args["applied"]) == self.oldest:
            # Where parts go together, a step is over only when all shards have applied it; the claim of the next one
            # says so.
            self._over(self.oldest, op.args["join_state"])
        stop = int(op.args["stop"])
        found = self._find(rank, stop)
        if found is None:
            if (held := self._held_back(stop)) is not None:
                # DSSP learns from it how long workers wait.
                self.terms.clock(held).refused()
            return {"step": None, "end": self.oldest >= stop}
        step, part = found
        if part >= 0:
            self.steps.setdefault(step, OpenStep()).claimed[part] = op.client
            ahead = step - self.oldest
            self.staleness[ahead] = self.staleness.get(ahead, 0) + 1
            self.terms.clock(step).granted(ahead)
        return {"step": step, "part": part, "join_state": self.join_state, "floor": self.oldest}

    def _take(self, op: Operation) -> TakeAnswer:
        """A part of this very step whose worker is lost, for one that is waiting in it."""
        rank = self.ranks.get(op.client, -1)
        for part in range(self.terms.parts):
            step = self.steps.get(op.clock)
            if step is not None and self._free(step, part, rank):
                step.claimed[part] = op.client
                return {"part": part}
        return {"part": -1}

    def _done(self, op: Operation) -> DoneAnswer:
        """A part is finished: its gradient is where it belongs, on all shards."""
        part = int(op.args["part"])
        step = self.steps.get(op.clock)
        # The part was given to another while this worker was thought lost. The one that came first counts.
        if op.clock < self.oldest or step is None or part in step.done:
            return {"dup": True}
        together = self.terms.clock(op.clock).together
        # With backup workers the update may be made without this part: counting it now would change the sum.
        if together and self._complete(op.clock):
            return {"late": True}
        step.done[part] = Done(float(op.args["total"]), float(op.args["count"]), str(op.args["used"]))
        complete = len(step.done) == self.terms.parts
        if not together:
            while self.oldest in self.steps and len(self.steps[self.oldest].done) == self.terms.parts:
                del self.steps[self.oldest]
                self._finish()
        return {"dup": False, "complete": complete}

    def _lost(self, op: Operation) -> dict[str, int]:
        """A worker has ended, or has been silent for too long."""
        worker = int(op.args["worker"])
        freed = self._release(worker)
        of_rank = self._of_rank(self.ranks[worker]) if worker in self.ranks else []
        if of_rank[:1] == [worker]:  # others have not gone to work
            self.lost.add(self.ranks[worker])
        if len(of_rank) > 1:
            del self.ranks[worker]
        return {"freed": freed}

    # Questions.

    def answer(self, op: Operation) -> Answer | None:
        if op.name == "ready":
            return Answer({"oldest": self.oldest, "join_state": self.join_state}) if self.ready else None
        if op.name == "turn":
            rank = self.ranks.get(op.client, -1)
            stop = int(op.args["stop"])
            return Answer({}) if self.oldest >= stop or self._find(rank, stop) is not None else None
        if op.name == "tally":
            return self._tally(op)
        if op.name == "status":
            return Answer(self.status())
        raise Refused(f"the ledger does not know '{op.name}'")

    def _tally(self, op: Operation) -> Answer | None:
        """The sum over a step's parts when all are done; or that a part of it is free again."""
        if op.clock < self.oldest:
            return Answer(self.recent.get(op.clock, {"over": True}))
        step = self.steps.get(op.clock, OpenStep())
        if not self._complete(op.clock):
            rank = self.ranks.get(op.client, -1)
            # None: the question waits (it is parked at the tail) until the step is complete or a part is free.
            free = any(self._free(step, part, rank) for part in range(self.terms.parts))
            return Answer({"free": True}) if free else None
        return Answer(sum_of(step))

    def status(self) -> LedgerStatus:
        """For reports."""
        claimed = sum(len(step.claimed) - len(step.done) for step in self.steps.values())
        return {
            "oldest": self.oldest,
            "claimed": claimed,
            "workers": len(self.ranks) - len(self.lost),
            "ids": [[worker, rank] for worker, rank in self.ranks.items() if rank not in self.lost],
            "staleness": [[ahead, count] for ahead, count in sorted(self.staleness.items())],
        }

    # How it decides.

    def _find(self, rank: int, stop: int) -> tuple[int, int] | None:
        """The next part for a worker; part -1: none is free, but a step needs somebody to finish it."""
        if not self.terms.parts or not self.ready:
            return None
        step = self.oldest
        while step < stop:
            clock = self.terms.clock(step)
            # Clocks are monotone: if a step may not begin, no later one may.
            if not clock.may_begin(step, self.oldest):
                return None
            together = clock.together
            entry = self.steps.get(step, OpenStep())
            # A worker's own part first: which samples it reads then does not depend on who else is fast.
            own = [rank] if 0 <= rank < self.terms.parts else []
            for part in (*own, *range(self.terms.parts)):
                if together and self._complete(step):
                    break
                if self._free(entry, part, rank) or (not together and self._unclaimed(entry, part)):
                    return step, part
            if together:
                # All parts of this step are given out, and a later one may not begin: help to finish it.
                return step, -1
            step += 1
        return None

    def _held_back(self, stop: int) -> int | None:
        """The first step before `stop` that its clock does not let begin."""
        if not self.terms.parts or not self.ready:
            return None
        steps = range(self.oldest, stop)
        return next((step for step in steps if not self.terms.clock(step).may_begin(step, self.oldest)), None)

    def _of_rank(self, rank: int) -> list[int]:
        return [worker for worker, other in self.ranks.items() if other == rank]

    def _unclaimed(self, step: OpenStep, part: int) -> bool:
        return part not in step.done and step.claimed.get(part, FREE) == FREE

    def _free(self, step: OpenStep, part: int, rank: int) -> bool:
        """Whether a part is this worker's own, or that of a worker who is lost, and nobody has it."""
        return self._unclaimed(step, part) and (part == rank or part in self.lost or part in step.claimed)

    def _complete(self, number: int) -> bool:
        step = self.steps.get(number)
        return step is not None and len(step.done) >= self.terms.parts - self.terms.backup

    def _over(self, step: int, join_state: JoinMessage) -> None:
        if self.terms.clock(step).together and self._complete(step):
            self.join_state = join_state
            self.recent[step] = sum_of(self.steps.pop(step))
            self.recent.pop(step - _RECENT, None)
            self._finish()

    def _finish(self) -> None:
        """The oldest step is over."""
        self.terms.clock(self.oldest).finished()
        self.oldest += 1

    def _release(self, worker: int) -> int:
        freed = 0
        for step in self.steps.values():
            for part, holder in step.claimed.items():
                if holder == worker and part not in step.done:
                    step.claimed[part] = FREE
                    freed += 1
        return freed

    # Copies.

    def snapshot(self) -> tuple[LedgerState, torch.Tensor]:
        steps = [
            (
                number,
                list(step.claimed.items()),
                [(part, done.total, done.count, done.used) for part, done in step.done.items()],
            )
            for number, step in self.steps.items()
        ]
        state: LedgerState = {
            "terms": self.terms.message() if self.terms.parts else None,
            "clocks": [clock.state() for _, clock in self.terms.clocks],
            "ready": self.ready,
            "oldest": self.oldest,
            "steps": steps,
            "ranks": list(self.ranks.items()),
            "lost": sorted(self.lost),
            "join_state": self.join_state,
            "model": self.model,
            "staleness": list(self.staleness.items()),
            "recent": list(self.recent.items()),
        }
        return state, torch.empty(0, dtype=torch.uint8)

    def restore(self, value: LedgerState, tensor: torch.Tensor) -> None:
        del tensor
        self.terms = WorkTerms.of(value["terms"]) if value["terms"] is not None else WorkTerms(0, ())
        # Clocks with a memory (DSSP) are part of the replicated state: a new copy must decide as the others do.
        for (_, clock), state in zip(self.terms.clocks, value["clocks"], strict=True):
            clock.restore(state)
        self.ready = value["ready"]
        self.oldest = value["oldest"]
        self.join_state = value["join_state"]
        self.steps = {
            number: OpenStep(
                dict(claimed), {part: Done(total, count, used) for part, total, count, used in done}
            )
            for number, claimed, done in value["steps"]
        }
        self.ranks = dict(value["ranks"])
        self.lost = set(value["lost"])
        self.model = value["model"]
        self.staleness = dict(value["staleness"])
        self.recent = dict(value["recent"])
