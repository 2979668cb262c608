"""The ledger: which part of which step is whose, what is done, and who may go on. One more machine.

The global batch of a step has as many parts as the job has workers. A worker claims a part, computes its gradient,
and says that it is done. The clock says which claims are granted:

    together      (bsp)       parts of the oldest step that is not applied; each worker has its own part, and takes
                              another's only when that worker is lost. All parts make one update.
    one by one    (ssp, asp)  the first free part, if its step is at most `window` steps ahead of the oldest step with a
                              part that is not done. Every part is an update of its own.

So nobody is ever further ahead of the slowest than the window; a slow worker gets fewer parts and a lost one's parts
go to the others. A part is done once: who comes second with it is told so.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from shoal.server.machine import Answer, Machine, Operation, Refused
from shoal.server.steps import FREE, Done, Step, WorkTerms, disagreement, sum_of

_RECENT = 16
"""What so many steps came to is remembered, for those who ask late."""


class Ledger(Machine):
    """The state of the whole job's work."""

    def __init__(self) -> None:
        self.terms = WorkTerms()
        self.ready = False
        """Whether the shards have their first values."""
        self.oldest = 0
        """Every step before it is over: done, and applied."""
        self.steps: dict[int, Step] = {}
        self.ranks: dict[int, int] = {}
        """Worker -> its rank, in the order in which they came."""
        self.lost: set[int] = set()
        """Ranks whose worker is lost and has not come back."""
        self.memo: Any = None
        """What the last worker to finish a step wants the next to know."""
        self.staleness: dict[int, int] = {}
        """How many claims were so many steps ahead of the oldest."""
        self.model: Any = None
        """Names, shapes and types of the parameters, as the first worker has them."""
        self.recent: dict[int, dict[str, Any]] = {}
        """What the last steps came to, for those who ask late."""

    # Changes.

    def apply(self, op: Operation) -> Answer:
        return Answer(getattr(self, f"_{op.name}")(op) if op.name in _CALLS else _refuse(op.name))

    def _join(self, op: Operation) -> dict[str, Any]:
        """A worker is there. One of the same rank was there before it: that one is gone, if this one goes to work.

        It may have ended long ago, and only its word have been late.
        """
        rank, model = int(op.args["rank"]), op.args["model"]
        if self.model is None:
            self.model = model
        if model != self.model:
            raise Refused(disagreement(self.model, model, rank))
        self.ranks.pop(op.client, None)
        for worker in self._of_rank(rank):
            self._release(worker)
        self.ranks[op.client] = rank
        self.lost.discard(rank)
        return {"ready": self.ready, "oldest": self.oldest, "memo": self.memo}

    def _begin(self, op: Operation) -> dict[str, Any]:
        """The shards have their values, and work begins at a step."""
        if not self.ready:
            self.ready, self.oldest, self.memo = True, op.clock, op.args["memo"]
        return {"oldest": self.oldest}

    def _agree(self, op: Operation) -> dict[str, Any]:
        """By which clock, and among how many, the work is done."""
        asked = WorkTerms(**op.args)
        known = self.terms
        if known.parts and (asked.parts, asked.windows, asked.backup) != (
            known.parts,
            known.windows,
            known.backup,
        ):
            raise Refused(
                f"workers disagree: one has {asked.parts} workers and clock {asked.windows}, the others "
                f"{known.parts} and {known.windows}; start all with the same strategy and number of workers."
            )
        self.terms = asked
        return {"oldest": self.oldest}

    def _claim(self, op: Operation) -> dict[str, Any]:
        """A part to work on. `applied`: a step whose parts went together, which all shards have applied."""
        if op.client not in self.ranks:
            raise Refused("this worker has been replaced by another of its rank")
        rank = self.ranks[op.client]
        of_rank = self._of_rank(rank)
        for worker in of_rank[: of_rank.index(op.client)]:
            del self.ranks[worker]
        self.lost.discard(rank)
        if op.args["applied"] is not None and int(op.args["applied"]) == self.oldest:
            self._over(self.oldest, op.args["memo"])
        stop = int(op.args["stop"])
        found = self._find(rank, stop)
        if found is None:
            return {"step": None, "end": self.oldest >= stop}
        step, part = found
        if part >= 0:
            self.steps.setdefault(step, Step()).claimed[part] = op.client
            ahead = step - self.oldest
            self.staleness[ahead] = self.staleness.get(ahead, 0) + 1
        return {"step": step, "part": part, "memo": self.memo, "floor": self.oldest}

    def _take(self, op: Operation) -> dict[str, Any]:
        """A part of this very step whose worker is lost, for one that is waiting in it."""
        rank = self.ranks.get(op.client, -1)
        for part in range(self.terms.parts):
            step = self.steps.get(op.clock)
            if step is not None and self._free(step, part, rank):
                step.claimed[part] = op.client
                return {"part": part}
        return {"part": -1}

    def _done(self, op: Operation) -> dict[str, Any]:
        """A part is finished: its gradient is where it belongs, on all shards."""
        part = int(op.args["part"])
        step = self.steps.get(op.clock)
        if op.clock < self.oldest or step is None or part in step.done:
            return {"dup": True}
        together = self.terms.at(op.clock)[1]
        if together and self._complete(op.clock):
            return {"late": True}
        step.done[part] = Done(float(op.args["total"]), float(op.args["count"]), str(op.args["used"]))
        complete = len(step.done) == self.terms.parts
        if not together:
            while self.oldest in self.steps and len(self.steps[self.oldest].done) == self.terms.parts:
                del self.steps[self.oldest]
                self.oldest += 1
        return {"dup": False, "complete": complete}

    def _lost(self, op: Operation) -> dict[str, Any]:
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
            return Answer({"oldest": self.oldest, "memo": self.memo}) if self.ready else None
        if op.name == "turn":
            rank = self.ranks.get(op.client, -1)
            stop = int(op.args["stop"])
            return Answer({}) if self.oldest >= stop or self._find(rank, stop) is not None else None
        if op.name == "tally":
            return self._tally(op)
        if op.name == "status":
            return Answer(self.status())
        return Answer(_refuse(op.name))

    def _tally(self, op: Operation) -> Answer | None:
        """The sum over a step's parts when all are done; or that a part of it is free again."""
        if op.clock < self.oldest:
            return Answer(self.recent.get(op.clock, {"over": True}))
        step = self.steps.get(op.clock, Step())
        if not self._complete(op.clock):
            rank = self.ranks.get(op.client, -1)
            free = any(self._free(step, part, rank) for part in range(self.terms.parts))
            return Answer({"free": True}) if free else None
        return Answer(sum_of(step))

    def status(self) -> dict[str, Any]:
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
            window, together = self.terms.at(step)
            if 0 <= window < step - self.oldest or (together and step > self.oldest):
                return None
            entry = self.steps.get(step, Step())
            own = [rank] if 0 <= rank < self.terms.parts else []
            for part in (*own, *range(self.terms.parts)):
                if together and self._complete(step):
                    break
                if self._free(entry, part, rank) or (not together and self._unclaimed(entry, part)):
                    return step, part
            if together:
                return step, -1
            step += 1
        return None

    def _of_rank(self, rank: int) -> list[int]:
        return [worker for worker, other in self.ranks.items() if other == rank]

    def _unclaimed(self, step: Step, part: int) -> bool:
        return part not in step.done and step.claimed.get(part, FREE) == FREE

    def _free(self, step: Step, part: int, rank: int) -> bool:
        """Whether a part is this worker's own, or that of a worker who is lost, and nobody has it."""
        return self._unclaimed(step, part) and (part == rank or part in self.lost or part in step.claimed)

    def _complete(self, number: int) -> bool:
        step = self.steps.get(number)
        return step is not None and len(step.done) >= self.terms.parts - self.terms.backup

    def _over(self, step: int, memo: Any) -> None:
        if self.terms.at(step)[1] and self._complete(step):
            self.memo = memo
            self.recent[step] = sum_of(self.steps.pop(step))
            self.recent.pop(step - _RECENT, None)
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

    def snapshot(self) -> tuple[Any, torch.Tensor]:
        steps = [
            [
                number,
                list(map(list, s.claimed.items())),
                [[p, d.total, d.count, d.used] for p, d in s.done.items()],
            ]
            for number, s in self.steps.items()
        ]
        value = {
            "terms": asdict(self.terms),
            "ready": self.ready,
            "oldest": self.oldest,
            "steps": steps,
            "ranks": [list(pair) for pair in self.ranks.items()],
            "lost": sorted(self.lost),
            "memo": self.memo,
            "model": self.model,
            "staleness": [list(pair) for pair in self.staleness.items()],
            "recent": [list(pair) for pair in self.recent.items()],
        }
        return value, torch.empty(0, dtype=torch.uint8)

    def restore(self, value: Any, tensor: torch.Tensor) -> None:
        del tensor
        self.terms = WorkTerms(**value["terms"])
        self.ready, self.oldest, self.memo = value["ready"], value["oldest"], value["memo"]
        self.steps = {
            number: Step(dict(claimed), {part: Done(*rest) for part, *rest in done})
            for number, claimed, done in value["steps"]
        }
        self.ranks, self.lost = dict(value["ranks"]), set(value["lost"])
        self.model = value["model"]
        self.staleness, self.recent = dict(value["staleness"]), dict(value["recent"])


_CALLS = ("join", "begin", "agree", "claim", "take", "done", "lost")


def _refuse(name: str) -> Any:
    raise Refused(f"the ledger does not know '{name}'")
