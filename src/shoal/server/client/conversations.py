"""What a worker does, step by step, as conversations with the shards. Sans I/O.

A conversation is a generator that yields the requests it waits for. Real workers run it by sleeping until the answers
are there (connection.py); the simulation runs many of them side by side, by the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shoal.errors import ServerRefused
from shoal.server.client.requests import Client, Request
from shoal.server.protocol.ledger_answers import (
    ClaimAnswer,
    DoneAnswer,
    JoinAnswer,
    JoinMessage,
    OldestAnswer,
    Parameters,
    ReadyAnswer,
    TakeAnswer,
    TallyAnswer,
)
from shoal.server.protocol.messages import Where
from shoal.server.protocol.view import LEDGER
from shoal.server.protocol.work_terms import TermsMessage

T = TypeVar("T")
Conversation = Generator[Sequence[Request], None, T]


@dataclass(frozen=True)
class Claim:
    """A part of a step; part -1: nothing to compute, but the step waits for somebody to finish it."""

    step: int
    part: int
    join_state: JoinMessage
    floor: int
    """Every step below is over."""


class WorkerProtocol:
    """One worker's side of the protocol."""

    def __init__(self, client: Client, rank: int, shards: Sequence[int]) -> None:
        self.client = client
        self.rank = rank
        self.shards = shards
        self._staged: list[Request] = []
        self._applied: int | None = None
        self.floor = 0

    def join(self, model: Parameters = None) -> Conversation[JoinAnswer]:
        """Say who this is, and of which model; tells whether the job is under way."""
        answer: JoinAnswer = yield from self._call("join", {"rank": self.rank, "model": model})
        return answer

    def begin(self, step: int, join_state: JoinMessage) -> Conversation[OldestAnswer]:
        """All shards have their values: work may begin at a step."""
        answer: OldestAnswer = yield from self._call("begin", {"join_state": join_state}, step)
        return answer

    def wait_ready(self) -> Conversation[ReadyAnswer]:
        """Until somebody has given the shards their values."""
        answer: ReadyAnswer = yield from self._answer(self.client.ask(LEDGER, "ready"))
        return answer

    def agree(self, terms: TermsMessage) -> Conversation[OldestAnswer]:
        """How much work there is, and by which clock."""
        answer: OldestAnswer = yield from self._call("agree", terms)
        return answer

    def claim(self, stop: int, join_state: JoinMessage = None) -> Conversation[Claim | None]:
        """The next part to work on before step `stop`, as soon as the clock allows; None when there is no more.

        `join_state`: for a worker that joins at this point.
        """
        while True:
            args = {"applied": self._applied, "join_state": join_state, "stop": stop}
            found: ClaimAnswer = yield from self._call("claim", args)
            if found["step"] is not None:
                self.floor = int(found["floor"])
                return Claim(int(found["step"]), int(found["part"]), found["join_state"], self.floor)
            if found["end"]:
                return None
            # The question is parked at the ledger until the clock lets this worker go on: no polling.
            yield from self._answer(self.client.ask(LEDGER, "turn", {"stop": stop}))

    def stage(
        self,
        shard: int,
        claim: tuple[int, int],
        micro: int,
        tensor: torch.Tensor,
        where: Where | None = None,
        codec: int = 0,
    ) -> Request:
        """Send a gradient on its way; `done` waits for it."""
        step, part = claim
        args = {"part": part, "micro": micro}
        request = self.client.call(shard, "stage", args, step, tensor, where, codec=codec)
        self._staged.append(request)
        return request

    def staged(self) -> Conversation[None]:
        """Until all servers hold what was staged."""
        waiting = self._staged
        self._staged = []
        yield waiting
        for request in waiting:
            _check(request)

    def done(self, claim: tuple[int, int], total: float, count: float, used: str) -> Conversation[DoneAnswer]:
        """A part is finished."""
        yield from self.staged()
        # After all servers hold the gradient: when the ledger says that a part is done, it can be used.
        args = {"part": claim[1], "total": total, "count": count, "used": used}
        answer: DoneAnswer = yield from self._call("done", args, claim[0])
        return answer

    def tally(self, step: int) -> Conversation[TallyAnswer]:
        """What a step came to, when all its parts are done; or {"part": n}, one whose worker is lost: do it first."""
        while True:
            found: TallyAnswer = yield from self._answer(self.client.ask(LEDGER, "tally", clock=step))
            if "free" not in found:
                return found
            # Another worker may have been quicker; then wait on.
            taken: TakeAnswer = yield from self._call("take", None, step)
            if taken["part"] >= 0:
                return {"part": taken["part"]}

    def applied(self, step: int) -> None:
        """A step whose parts go together is over; the next claim tells the ledger."""
        self._applied = step

    def everywhere(self, name: str, step: int, args: object) -> Conversation[None]:
        """Make one call to every shard but the ledger."""
        requests = [self.client.call(shard, name, args, step) for shard in self.shards]
        yield requests
        for request in requests:
            _check(request)

    def _call(self, name: str, args: object, clock: int = 0) -> Conversation[Any]:
        return (yield from self._answer(self.client.call(LEDGER, name, args, clock)))

    def _answer(self, request: Request) -> Conversation[Any]:
        """A plain value, whose form each kind of request has for itself: callers name it."""
        yield (request,)
        _check(request)
        assert request.answer is not None
        return request.answer.value


def _check(request: Request) -> None:
    if request.refusal:
        raise ServerRefused(f"shard {request.shard} refused '{request.name}': {request.refusal}")
