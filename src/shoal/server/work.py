"""What a worker does, step by step, as conversations with the shards. Sans I/O.

A conversation is a generator that yields the requests it waits for. Real workers run it by sleeping until the answers
are there (link.py); the simulation runs many of them side by side, by the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shoal.errors import ServerRefused
from shoal.server.client import Client, Request
from shoal.server.message import Where
from shoal.server.view import LEDGER

T = TypeVar("T")
Conversation = Generator[Sequence[Request], None, T]


@dataclass(frozen=True)
class Claim:
    """A part of a step; part -1: nothing to compute, but the step waits for somebody to finish it."""

    step: int
    part: int
    memo: Any
    floor: int
    """Every step below is over."""


class Work:
    """One worker's side of the protocol."""

    def __init__(self, client: Client, rank: int, shards: Sequence[int]) -> None:
        self.client, self.rank, self.shards = client, rank, shards
        self._staged: list[Request] = []
        self._applied: int | None = None
        self.floor = 0

    def join(self, model: Any = None) -> Conversation[dict[str, Any]]:
        """Say who this is, and of which model; tells whether the job is under way."""
        return (yield from self._call("join", {"rank": self.rank, "model": model}))

    def begin(self, step: int, memo: Any) -> Conversation[dict[str, Any]]:
        """All shards have their values: work may begin at a step."""
        return (yield from self._call("begin", {"memo": memo}, step))

    def wait_ready(self) -> Conversation[dict[str, Any]]:
        """Until somebody has given the shards their values."""
        return (yield from self._answer(self.client.ask(LEDGER, "ready")))

    def agree(self, terms: Mapping[str, Any]) -> Conversation[dict[str, Any]]:
        """How much work there is, and by which clock."""
        return (yield from self._call("agree", dict(terms)))

    def claim(self, stop: int, memo: Any = None) -> Conversation[Claim | None]:
        """The next part to work on before step `stop`, as soon as the clock allows; None when there is no more.

        `memo`: what a worker should know that begins where this one stands.
        """
        while True:
            found = yield from self._call("claim", {"applied": self._applied, "memo": memo, "stop": stop})
            if found["step"] is not None:
                self.floor = int(found["floor"])
                return Claim(int(found["step"]), int(found["part"]), found["memo"], self.floor)
            if found["end"]:
                return None
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
        waiting, self._staged = self._staged, []
        yield waiting
        for request in waiting:
            _check(request)

    def done(
        self, claim: tuple[int, int], total: float, count: float, used: str
    ) -> Conversation[dict[str, Any]]:
        """A part is finished."""
        yield from self.staged()
        told = {"part": claim[1], "total": total, "count": count, "used": used}
        return (yield from self._call("done", told, claim[0]))

    def tally(self, step: int) -> Conversation[dict[str, Any]]:
        """What a step came to, when all its parts are done; or {"part": n}, one whose worker is lost: do it first."""
        while True:
            found = yield from self._answer(self.client.ask(LEDGER, "tally", clock=step))
            if "free" not in found:
                return found
            taken = yield from self._call("take", None, step)
            if taken["part"] >= 0:
                return taken

    def applied(self, step: int) -> None:
        """A step whose parts go together is over; the next claim tells the ledger."""
        self._applied = step

    def everywhere(self, name: str, step: int, args: Any) -> Conversation[None]:
        """The same call to every shard but the ledger."""
        requests = [self.client.call(shard, name, args, step) for shard in self.shards]
        yield requests
        for request in requests:
            _check(request)

    def _call(self, name: str, args: Any, clock: int = 0) -> Conversation[dict[str, Any]]:
        return (yield from self._answer(self.client.call(LEDGER, name, args, clock)))

    def _answer(self, request: Request) -> Conversation[dict[str, Any]]:
        yield (request,)
        _check(request)
        assert request.answer is not None
        value: dict[str, Any] = request.answer.value
        return value


def _check(request: Request) -> None:
    if request.refusal:
        raise ServerRefused(f"shard {request.shard} refused '{request.name}': {request.refusal}")
