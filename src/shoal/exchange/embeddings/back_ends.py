"""How tables of rows are reached: shards on servers, or machines beside the model. The same words go to both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from shoal.errors import ConfigError, ServerRefused
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.client.requests import Request
from shoal.server.protocol.state_machine import Answer, Operation, Refused
from shoal.server.rows.row_machine import RowMachine

Pending = Callable[[], Answer]
"""Waits for an answer, if it is not there yet."""
Claim = tuple[int, int]
"""A step, and a part of it."""


class RowBackend(Protocol):
    """The way to shards, by number."""

    def call(
        self, shard: int, name: str, args: object, clock: int, tensor: torch.Tensor | None = None
    ) -> Pending: ...

    def ask(
        self,
        shard: int,
        name: str,
        args: object = None,
        clock: int = 0,
        tensor: torch.Tensor | None = None,
        expects: int = 0,
    ) -> Pending:
        """`expects`: about so many bytes of numbers."""

    def stage(self, shard: int, claim: Claim, tensor: torch.Tensor) -> None:
        """A gradient of rows; that it has arrived is known before its part counts as done."""


class ToServers:
    """Through a worker's connection to its servers."""

    def __init__(self, link: Link, work: WorkerProtocol) -> None:
        self._link = link
        self._work = work

    def call(
        self, shard: int, name: str, args: object, clock: int, tensor: torch.Tensor | None = None
    ) -> Pending:
        return self._pending(self._link.request(lambda c: c.call(shard, name, args, clock, tensor)))

    def ask(
        self,
        shard: int,
        name: str,
        args: object = None,
        clock: int = 0,
        tensor: torch.Tensor | None = None,
        expects: int = 0,
    ) -> Pending:
        return self._pending(
            self._link.request(lambda c: c.ask(shard, name, args, clock, tensor, expects=expects))
        )

    def stage(self, shard: int, claim: Claim, tensor: torch.Tensor) -> None:
        self._link.request(lambda _: self._work.stage(shard, claim, 0, tensor))

    def _pending(self, request: Request) -> Pending:
        def answer() -> Answer:
            self._link.wait([request])
            if request.refusal:
                raise ServerRefused(f"shard {request.shard} refused '{request.name}': {request.refusal}")
            assert request.answer is not None
            return request.answer

        return answer


class InProcess:
    """In this process: everything is done at once."""

    def __init__(self, shards: Iterable[int]) -> None:
        self._machines = {shard: RowMachine() for shard in shards}

    def call(
        self, shard: int, name: str, args: object, clock: int, tensor: torch.Tensor | None = None
    ) -> Pending:
        return self._done(self._machines[shard].apply, Operation(name, clock, args, tensor))

    def ask(
        self,
        shard: int,
        name: str,
        args: object = None,
        clock: int = 0,
        tensor: torch.Tensor | None = None,
        expects: int = 0,
    ) -> Pending:
        del expects
        return self._done(self._machines[shard].answer, Operation(name, clock, args, tensor))

    def stage(self, shard: int, claim: Claim, tensor: torch.Tensor) -> None:
        self.call(shard, "stage", {"part": claim[1]}, claim[0], tensor)

    @staticmethod
    def _done(action: Callable[[Operation], Answer | None], operation: Operation) -> Pending:
        try:
            found = action(operation)
        except Refused as reason:
            raise ConfigError(str(reason)) from None
        assert found is not None, f"nobody else is here to wait for: {operation.name}"
        return lambda: found
