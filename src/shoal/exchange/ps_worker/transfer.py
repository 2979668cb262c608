"""Transfer of values, optimizer state and gradients between a worker, which names parameters, and its shards, which
are flat ranges."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn, optim

from shoal.errors import ServerRefused
from shoal.exchange.ps_worker.bucket_shards import Shard
from shoal.exchange.ps_worker.pull import Incoming
from shoal.server.client.connection import Link
from shoal.server.client.requests import Request
from shoal.server.protocol.dense_messages import InitArguments, KnownNorm, StateEntry, UpdateArguments
from shoal.server.protocol.ledger_answers import LedgerStatus
from shoal.server.protocol.messages import Where
from shoal.server.protocol.optimizer_description import OptimizerDescription
from shoal.server.protocol.state_machine import Answer
from shoal.server.protocol.view import LEDGER
from shoal.server.transport.shm_transport import same_host
from shoal.server.transport.slabs import Opened
from shoal.world.shm.memory import put

_TRIES = 200
"""How often a copy that was torn by an update is made again before the server is asked anew."""


class Transfer:
    """One worker's connection to its shards."""

    def __init__(
        self,
        link: Link,
        shards: Sequence[Shard],
        vectors: Sequence[torch.Tensor],
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        later: bool,
    ) -> None:
        """`later`: whether values may come while the model runs."""
        self._link = link
        self._shards = shards
        self._vectors = vectors
        self.later = later
        self._opened = Opened()
        self.incoming = Incoming(model, trained, shards, self._receive)

    # To the servers.

    def give(
        self,
        groups: Mapping[str, int],
        optimizer: OptimizerDescription,
        aggregate: str,
        hold: bool,
        code: str,
        step: int,
    ) -> bool:
        """First values, and the optimizer that will change them. False if the servers have some already."""
        requests = []
        for shard in self._shards:
            args: InitArguments = {
                "pieces": shard.plain_pieces(groups),
                "optimizer": optimizer,
                "aggregate": aggregate,
                "hold": hold,
                "code": code,
            }
            values = self._range(shard).cpu()
            requests.append(self._call(shard, "init", args, step, values))
        # Any worker may come first, or come again after a crash: a shard takes the first values only and says so.
        return not any(answer.value["dup"] for answer in self._check(requests))

    def give_state(self, optimizer: optim.Optimizer, named: Mapping[str, nn.Parameter], step: int) -> None:
        """Optimizer state of a checkpoint, where there is any."""
        requests = []
        for shard in self._shards:
            state = [optimizer.state.get(named[piece.name], {}) for piece in shard.pieces]
            for key in dict.fromkeys(key for entries in state for key in entries):
                requests.append(self._give_entry(shard, key, state, named, step))
        self._check([request for request in requests if request is not None])

    def _give_entry(
        self,
        shard: Shard,
        key: str,
        state: Sequence[Mapping[str, object]],
        named: Mapping[str, nn.Parameter],
        step: int,
    ) -> Request | None:
        having = {
            index: value
            for index, entries in enumerate(state)
            if isinstance(value := entries.get(key), torch.Tensor)
        }
        if not having:
            return None
        index, first = next(iter(having.items()))
        # State by element (momentum) travels as one vector for the shard, state by parameter (step counts) as a list. A
        # parameter of one element would fit both, hence the name.
        each = first.shape == named[shard.pieces[index].name].shape and key != "step"
        args: StateEntry = {
            "key": key,
            "each": each,
            "pieces": list(having),
            "values": None,
            "dtype": str(first.dtype).removeprefix("torch."),
        }
        whole = None
        if each:
            whole = torch.zeros(shard.size, dtype=first.dtype, device="cpu")
            for index, tensor in having.items():
                piece, value = shard.pieces[index], tensor.reshape(-1)
                start = piece.start - shard.start
                whole[start : start + piece.numel] = value[piece.offset : piece.offset + piece.numel].cpu()
        else:
            args["values"] = [float(value) for value in having.values()]
        return self._call(shard, "state", args, step, whole)

    def apply(self, step: int, args: UpdateArguments, used: set[str], fresh: int | None) -> bool:
        """Have an update made; `fresh`: and ask for the values as soon as so many steps are applied.

        True for one of those who ask for the same update: the one that was first.
        """
        calls, asks = {}, {}
        for shard in self.incoming.order:
            here = [index for index, piece in enumerate(shard.pieces) if piece.name in used]
            # Indices instead of names: None, the usual case, costs nothing on the wire.
            some: UpdateArguments = {**args, "used": None if len(here) == len(shard.pieces) else here}
            calls[shard.number] = self._call(shard, "apply", some, step)
            if fresh is not None:
                asks[shard.number] = self._ask_values(shard, {"applied": fresh})
        # Shards may see workers' calls in different orders: the first shard alone says who was first.
        first = not self._check([calls[shard.number] for shard in self._shards])[0].value["dup"]
        self.incoming.expect(asks, {"applied": fresh}, self._may_come_later)
        return first

    # From the servers.

    def fetch(self, applied: int, later: bool = False) -> None:
        """Fresh values of all shards, with all steps below `applied` in them; `later`: when they are needed."""
        args = {"applied": applied}
        asks = {shard.number: self._ask_values(shard, args) for shard in self.incoming.order}
        self.incoming.expect(asks, args, later and self._may_come_later)

    def borrow(self) -> int:
        """First values from another worker; the step that they are for, or -1 if there are none to be had."""
        shards = {shard.number: shard for shard in self._shards}

        def take(number: int, answer: Answer) -> bool:
            target, found = self._range(shards[number]), answer.tensor
            if found is None or (found.numel(), found.dtype) != (target.numel(), target.dtype):
                return False
            if answer.where is not None and not self._copy(answer.where, target):
                return False
            if answer.where is None:
                put(target, found)
            # Passed on at once, shard by shard: the tree works as a pipeline.
            self._link.lend(int(answer.value["step"]), number, target)
            return True

        step = self._link.borrow({number: shard.nbytes for number, shard in shards.items()}, take)
        self._opened.close()  # what was lent must not stay in memory for our sake
        return step

    def lend(self, step: int) -> None:
        """Let other workers have the values that a step begins with, if any may come for them."""
        for shard in self._shards:
            self._link.lend(step, shard.number, self._range(shard))

    def squares(
        self, step: int, parts: Sequence[Sequence[float]], slices: int
    ) -> list[list[float] | KnownNorm]:
        """Σ g² of each shard, slice by slice of its bucket; or {"norm": ...} of the whole, if the update is made."""
        requests = []
        for shard in self._shards:
            width = shard.bucket.size // slices
            edges = [
                min(max(rank * width, shard.start), shard.stop) - shard.start for rank in range(slices + 1)
            ]
            # A bucket that slices do not divide evenly leaves a rest behind the last; it counts there.
            edges[-1] = shard.stop - shard.start
            ranges = [list(pair) for pair in pairwise(edges)]
            requests.append(self._ask(shard, "squares", {"parts": parts, "ranges": ranges}, step))
        return [answer.value for answer in self._check(requests)]

    def gradients(self, step: int, parts: Sequence[Sequence[float]], vectors: Sequence[torch.Tensor]) -> None:
        """The gradient of a step, into vectors of this worker."""
        requests = [
            self._ask(shard, "gradient", {"parts": parts}, step, shard.nbytes) for shard in self._shards
        ]
        for shard, answer in zip(self._shards, self._check(requests), strict=True):
            assert answer.tensor is not None
            vectors[shard.bucket.index][shard.start : shard.stop].copy_(answer.tensor)

    def take_state(self, optimizer: optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        """The whole optimizer state, as if it were kept here."""
        optimizer.state.clear()
        keys = self._check([self._ask(shard, "keys") for shard in self._shards])
        for shard, known in zip(self._shards, keys, strict=True):
            requests = [self._ask(shard, "state", {"key": key}, expects=shard.nbytes) for key in known.value]
            for answer in self._check(requests):
                self._take_entry(shard, answer, optimizer, named)

    def _take_entry(
        self, shard: Shard, answer: Answer, optimizer: optim.Optimizer, named: Mapping[str, nn.Parameter]
    ) -> None:
        entry: StateEntry = answer.value
        dtype = getattr(torch, entry["dtype"])
        for at, index in enumerate(entry["pieces"]):
            piece = shard.pieces[index]
            parameter = named[piece.name]
            state = optimizer.state[parameter]
            if entry["values"] is not None:
                state[entry["key"]] = torch.tensor(entry["values"][at], dtype=dtype, device="cpu")
                continue
            if entry["key"] not in state:
                plain = torch.contiguous_format
                state[entry["key"]] = torch.zeros_like(parameter, dtype=dtype, memory_format=plain).detach()
            assert answer.tensor is not None
            start = piece.start - shard.start
            whole = state[entry["key"]].view(-1)
            whole[piece.offset : piece.offset + piece.numel] = answer.tensor[start : start + piece.numel]

    def ledger_status(self) -> LedgerStatus:
        """What the ledger says of the work."""
        with self._link.lock:
            request = self._link.client.ask(LEDGER, "status")
        found: LedgerStatus = self._check([request])[0].value
        return found

    # Helpers.

    @property
    def ahead(self) -> bool:
        """Whether to ask for values once the next step is claimed: they come while the model runs.

        Not before: on a slow wire, whatever is asked after them waits until they are through.
        """
        return self.incoming.guarded and self._may_come_later

    @property
    def _may_come_later(self) -> bool:
        """In the memory of one host, values are here as soon as they are asked for."""
        servers = self._link.client.view.addresses
        return self.later and not all(same_host(self._link.me, server) for server in servers)

    def _receive(self, shard: Shard, request: Request, args: Mapping[str, object]) -> None:
        """Copy values that have been asked for; where an update tears the copy, copy again."""
        target = self._range(shard)
        while True:
            answer = self._check([request])[0]
            if answer.where is None:
                assert answer.tensor is not None
                put(target, answer.tensor)
                return
            if self._copy(answer.where, target):
                return
            request = self._ask_values(shard, args)

    def _copy(self, where: Where, target: torch.Tensor) -> bool:
        source = self._opened.tensor(where)
        # A server keeps its sequence number in the first word of the memory, its values after it.
        word = self._opened.tensor(Where(where.path, 0, 1, torch.int64))
        if source is None or word is None:
            return False  # its server has just ended
        for _ in range(_TRIES):
            before = int(word)
            # A sequence lock: odd while a server writes; even and the same afterwards, nothing was torn.
            if before % 2 == 0:
                put(target, source)
                if int(word) == before:
                    return True
            # A writer is at work, or was a moment ago: let it have the core.
            time.sleep(0.0005)
        return False

    def _range(self, shard: Shard) -> torch.Tensor:
        return self._vectors[shard.bucket.index][shard.start : shard.stop]

    def _call(
        self, shard: Shard, name: str, args: object, clock: int, tensor: torch.Tensor | None = None
    ) -> Request:
        with self._link.lock:
            return self._link.client.call(shard.number, name, args, clock, tensor)

    def _ask_values(self, shard: Shard, args: Mapping[str, object]) -> Request:
        with self._link.lock:
            return self._link.client.ask(shard.number, "values", args, expects=shard.nbytes)

    def _ask(self, shard: Shard, name: str, args: object = None, clock: int = 0, expects: int = 0) -> Request:
        with self._link.lock:
            return self._link.client.ask(shard.number, name, args, clock, expects=expects)

    def _check(self, requests: Sequence[Request]) -> list[Answer]:
        self._link.wait(requests)
        for request in requests:
            if request.refusal:
                what = "the ledger" if request.shard == LEDGER else f"shard {request.shard}"
                raise ServerRefused(f"{what} refused '{request.name}': {request.refusal}")
        return [request.answer for request in requests if request.answer is not None]
