"""A worker of the simulation: its conversations with the servers are the real ones, what it computes is not."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch

from shoal.server.client.conversations import Claim, Conversation, WorkerProtocol
from shoal.server.client.requests import Client, Request
from shoal.server.protocol.ledger_answers import TallyAnswer
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind
from shoal.server.protocol.view import LEDGER
from shoal.testing.history import JobHistory, Read, WriteEvent
from shoal.testing.network import Network, converse
from shoal.testing.shape import JobShape


class JobView(Protocol):
    """What a simulated worker uses of its job."""

    shape: JobShape
    network: Network
    history: JobHistory


class SimulatedWorker:
    """A worker that computes nothing: its conversations are the real ones."""

    def __init__(self, job: JobView, me: int, rank: int, send: Callable[[int, Message], None]) -> None:
        self.job = job
        self.me = me
        self.rank = rank
        self._send = send
        shape = job.shape
        self.client = Client(me, send)
        self.work = WorkerProtocol(self.client, rank, range(1, shape.shards + 1))
        self.finished = False
        self.hang = 0.0
        """Seconds that its next part takes longer."""
        self._held_since: float | None = None
        self._beat = -1.0
        self._heard = job.network.now
        converse(job.network, self._live(), self._end)

    def on_message(self, source: int, message: Message, now: float) -> None:
        del source
        if message.kind == MessageKind.REPLY and not self.finished:
            self.job.history.longest = max(self.job.history.longest, now - self._heard)
            self._heard = now
        self.client.on_message(message, now)

    def on_time(self, now: float) -> None:
        self.client.on_time(now)
        shape = self.job.shape
        kinds = ["ledger", *["dense"] * shape.shards]
        terms = [[1] * (shape.shards + 1), kinds, shape.servers, shape.replicas, shape.patience]
        if now - self._beat >= 0.1 and not self.finished:
            self._beat = now
            held = 0.0 if self._held_since is None else now - self._held_since
            sign = {"role": "worker", "rank": self.rank, "held": held, "terms": terms}
            self._send(
                COORDINATOR, Message(MessageKind.ALIVE, self.client.view.epoch, client=self.me, meta=sign)
            )

    def _end(self, _: object) -> None:
        self.finished = True
        self.job.history.finished += 1
        self._send(COORDINATOR, Message(MessageKind.BYE, client=self.me))

    def _live(self) -> Generator[Sequence[Request], None, None]:
        shape = self.job.shape
        work = self.work
        joined = yield from work.join()
        if not joined["ready"]:
            if self.rank == 0:
                pieces = [[0, shape.steps * shape.workers, 0]]
                description = {"kind": "SGD", "groups": [{"lr": 1.0}]}
                init = {
                    "pieces": pieces,
                    "optimizer": description,
                    "aggregate": "weighted",
                    "hold": shape.holds_parts,
                }
                values = torch.zeros(shape.steps * shape.workers, dtype=torch.float64)
                requests = [self.client.call(shard, "init", init, tensor=values) for shard in work.shards]
                yield requests
                yield from work.begin(0, None)
            yield from work.wait_ready()
        yield from work.agree(shape.terms.message())
        while (claim := (yield from work.claim(shape.steps))) is not None:
            self._held_since = self.job.network.now
            self.job.history.claims.append((claim.step, claim.floor))
            yield from self._step(claim)
            self._held_since = None

    def _step(self, claim: Claim) -> Generator[Sequence[Request], None, None]:
        work = self.work
        step = claim.step
        together = self.job.shape.terms.clock(step).together
        yield from self._read(step, step if together else 0)
        part = claim.part
        found: TallyAnswer = {}
        if part < 0:
            found = yield from self._tally(step)
            part = found.get("part", -1)
        while part >= 0:
            yield from self._compute()
            self.job.history.computed.append((step, part))
            for shard in work.shards:
                work.stage(shard, (step, part), 0, self._gradient(step, part))
            if not together:
                yield from self._apply(step, [part])
                yield from work.done((step, part), 1.0, 1.0, "1")
                return
            yield from work.done((step, part), 1.0, 1.0, "1")
            found = yield from self._tally(step)
            part = found.get("part", -1)
        if "over" not in found:
            yield from self._apply(step, [int(part) for part, _ in found["parts"]])
            work.applied(step)

    def _tally(self, step: int) -> Conversation[TallyAnswer]:
        """What a step came to, or a part of it that has become free."""
        self._held_since = None  # to wait is not to hold anything up
        found = yield from self.work.tally(step)
        self._held_since = self.job.network.now if "part" in found else None
        return found

    def _apply(self, step: int, parts: Sequence[int]) -> Generator[Sequence[Request], None, None]:
        shape = self.job.shape
        history = self.job.history
        network = self.job.network
        yield from self.work.staged()
        started: list[WriteEvent] = []
        args = {
            "parts": [[part, 1.0] for part in parts],
            "factor": 1.0,
            "limit": None,
            "settings": [{"lr": 1.0}],
            "used": None,
            "share": 1.0,
            "floor": self.work.floor,
        }
        requests = []
        for shard in self.work.shards:
            for part in parts:
                started.append(WriteEvent(shard, network.now, float("inf"), step * shape.workers + part))
            requests.append(self.client.call(shard, "apply", args, step))
        history.writes.extend(started)
        history.updates.append((step, tuple(parts)))
        yield requests
        for write in started:
            write.answered = network.now

    def _read(self, step: int, applied: int) -> Generator[Sequence[Request], None, None]:
        network = self.job.network
        sent = network.now
        requests = [self.client.ask(shard, "values", {"applied": applied}) for shard in self.work.shards]
        for request in requests:
            yield (request,)
            assert request.answer is not None
            assert request.answer.tensor is not None
            values = request.answer.tensor
            parts = frozenset(torch.nonzero(values).view(-1).tolist())
            assert set(values.tolist()) <= {0.0, -1.0}, f"a part was applied twice: {values.tolist()}"
            self.job.history.reads.append(Read(request.shard, sent, network.now, step, parts))

    def _compute(self) -> Generator[Sequence[Request], None, None]:
        """Takes some time, a slow worker's more."""
        slow = 8 if self.rank == 1 and self.job.network.random.random() < 0.3 else 1
        hang = self.hang
        self.hang = 0.0
        yield from self._sleep(self.job.network.random.uniform(0.01, 0.05) * slow + hang)

    def _sleep(self, seconds: float) -> Generator[Sequence[Request], None, None]:
        done = Request(MessageKind.ASK, LEDGER, 0, "", None, 0, None, None)

        def finish() -> None:
            done.done = True
            if done.then is not None:
                done.then(done)

        self.job.network.work(self.me, seconds, finish)
        yield (done,)

    def _gradient(self, step: int, part: int) -> torch.Tensor:
        gradient = torch.zeros(self.job.shape.steps * self.job.shape.workers, dtype=torch.float64)
        gradient[step * self.job.shape.workers + part] = 1.0
        return gradient


class SimulatedReader(SimulatedWorker):
    """Reads all shards, again and again, and does no work: it sees what workers are too busy to see."""

    def __init__(self, job: JobView, me: int, send: Callable[[int, Message], None]) -> None:
        super().__init__(job, me, job.shape.workers, send)

    def _live(self) -> Generator[Sequence[Request], None, None]:
        yield from self.work.wait_ready()
        while self.job.history.finished < self.job.shape.workers:
            yield from self._read(-1, 0)
            yield from self._sleep(self.job.network.random.uniform(0.0, 0.03))

    def _end(self, _: object) -> None:
        self.finished = True
        self._send(COORDINATOR, Message(MessageKind.BYE, client=self.me))
