"""The parameter server: servers hold the parameters and run the optimizer; workers send gradients and fetch values.

Parameters lie in the same flat buckets as under ddp; each bucket is a shard of a chain of servers, or several. A full
bucket goes out while backward goes on. Workers need no word from each other: a ledger among the shards hands out parts
of each step, so a worker that is lost, slow or new changes who computes what, and nothing else.

    bsp         all parts of a step make one update, by the numbers of ddp, bit for bit in deterministic mode
    ssp, asp    each part makes an update as soon as it is there, with its share of the learning rate

When to use: workers that come and go or differ in speed, embeddings larger than a worker, or a run that must survive
`kill -9` of anything. Equal and reliable workers of one host are served better by `shared`.
Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from shoal.errors import ConfigError, ServerRefused
from shoal.exchange.base import Tally
from shoal.exchange.norms import sum_of_squares
from shoal.exchange.outgoing import Outgoing
from shoal.exchange.ps_options import PsOptions
from shoal.exchange.rowlines import ToServers
from shoal.exchange.served import Served
from shoal.exchange.served_state import ServedState
from shoal.exchange.setup import BucketOptions, Setup
from shoal.exchange.shards import cut_shards, sum_of_slices
from shoal.exchange.tables import Tables
from shoal.exchange.tier import Tier
from shoal.exchange.turn import Turn
from shoal.server.coded import describe_code
from shoal.server.description import describe, settings_of
from shoal.server.found import find_servers
from shoal.server.link import Link
from shoal.server.post import new_id
from shoal.server.view import ROWS
from shoal.server.work import Work
from shoal.types import Memory, Promise
from shoal.world.buckets import Bucket
from shoal.world.world import Handle, World

_LEDGER_BYTES = 4096


class Ps(ServedState):
    """Gradients go to servers, values come from them."""

    promise = Promise.EXACT
    summary = "servers hold the parameters and run the optimizer; its clock says how exact"
    Options = PsOptions
    whole_updates = whole_models = compresses = True
    apart = keeps_rows = True
    tables: Tables

    def __init__(self, setup: Setup, options: PsOptions) -> None:
        self._options, self._who, self._recorded = options, setup.world, setup.recorded
        self._compressor = setup.compressor
        self._micro = 0
        self._fresh = -1
        self._started = self._claimed = False
        self._counted = 0
        self._norm: float | None = None
        self._mine = Tally(0.0, 0.0)
        self._tier = Tier(setup.peers or setup.world, options.tier == "host")
        lone = World.alone(setup.world.device)
        super().__init__(replace(setup, world=lone), BucketOptions(options.bucket_mb), owners=setup.world)
        self._order_is_seen = True  # where parameters lie is agreed on before the first gradient
        self._description = describe(self.given)
        self.each = self.each and self._tier.local.size == 1  # a unit sums all its micro-batches first
        self._turn = Turn(self._tier.units, options)
        self.tables = Tables(self.module, self.given, setup.seed, options.servers, 1 + len(self.shards))
        self.tables.check_aggregate(options.aggregate)
        self.begins = False
        if self._tier.leads:
            self._connect()
        if self._tier.local.size > 1 and len(self.tables):
            raise ConfigError("SparseEmbedding and ps(tier=host) do not go together yet; leave tier out.")

    def _connect(self) -> None:
        options, who, tables = self._options, self._who, self.tables
        me = new_id()
        alone = self._tier.local.size == 1
        self._servers = find_servers(who, me, options.servers, options.at, options.keys, alone)
        sizes = [_LEDGER_BYTES, *(shard.nbytes for shard in self.shards), *tables.sizes]
        kinds = ["ledger", *["dense"] * len(self.shards), *[ROWS] * len(tables.shards)]
        terms = [sizes, kinds, options.servers, options.copies, options.patience]
        self.link = Link(me, self._servers.address, self._servers.keys, self._tier.unit, terms)
        self._work = Work(self.link.client, self._tier.unit, range(1, len(sizes)))
        self._turn.connect(self.link, self._work)
        self._outgoing.connect(self.link, self._work)
        self.complete_for(self.module)
        self._served = Served(self.link, self.shards, self.vectors, self.module, self.trained, later=alone)
        tables.connect(ToServers(self.link, self._work), self._turn)
        model = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in self.module.named_parameters()]
        try:
            joined = self.link.run(self._work.join(model + tables.signature()))
        except ServerRefused:
            self.link.close()  # others must not wait for this worker
            raise
        self.begins = self._tier.unit == 0 and not joined["ready"]

    # Where things lie.

    def lay_out_again(self, order: list[str]) -> None:
        del order  # where things lie was agreed on with the servers, and sums do not depend on it

    def allocate(self) -> list[torch.Tensor]:
        # The norm adds up what shards say. To round as ddp does, they must be what ddp adds up: whole buckets.
        self.shards = cut_shards(self.buckets, sys.maxsize if self.deterministic else self._capacity)
        device, tier = self.world.device, self._tier
        if tier.local.size == 1:
            self._outgoing = Outgoing(self.buckets, self.shards, device, self._compressor)
            self._gradients = self._outgoing.gradients
            return [torch.zeros(b.size, dtype=b.dtype, device=device) for b in self.buckets]
        parameters = tier.vectors(self.buckets, "parameters")
        self._theirs = [tier.vectors(self.buckets, f"gradients{rank}") for rank in range(tier.local.size)]
        self._outgoing = Outgoing(self.buckets, self.shards, device, self._compressor, self._theirs[0])
        self._gradients = self._theirs[tier.local.rank]
        return parameters

    def gradient_vector(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._gradients[bucket.index]

    def publish(self) -> None:
        return

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        if self._tier.local.size > 1:
            return self._tier.reduce(bucket, [vectors[bucket.index] for vectors in self._theirs])
        self._outgoing.fill(bucket, vector)
        return self._outgoing.stage(bucket, (self._turn.step, self._turn.part), self._micro)

    def settle(self) -> None:
        self._micro += 1

    # The step.

    def start(self, step: int, memo: Any) -> None:
        """Give the shards their first values, or wait until somebody has."""
        self._started = True
        self._tier.lead(lambda: self._start(step, memo))
        self.optimizer.state.clear()

    def _start(self, step: int, memo: Any) -> None:
        if not self.begins:
            self.first_values(self.link.run(self._work.wait_ready())["oldest"])
            return
        groups = {name: number for number, names in enumerate(self._groups) for name in names}
        how = {"aggregate": self._options.aggregate, "hold": self._turn.holds_parts}
        how["code"] = describe_code(self._compressor)
        taken = self._served.give(groups, self._description, how, step)
        self._served.give_state(self.optimizer, self.trained, step)
        self.tables.begin(step)
        if self.link.run(self._work.begin(step, memo))["oldest"] == step and taken:
            self._fresh = step
            self._served.lend(step)

    def claim(self, step: int, stop: int) -> int | None:
        if not self._started:
            self.start(step, self.memo)
        turn = self._turn
        state = self._tier.lead(lambda: turn.state() if turn.claim(stop, self.memo) else None)
        if state is None:
            return None
        turn.adopt(state)
        self._claimed, self.told = True, turn.memo
        self.counts_own = not turn.together
        return turn.step

    def first_part(self, step: int, own: int) -> int:
        del own
        if not self._claimed:
            self.claim(step, step + 1)
        self._claimed = self.saves = False
        return self._tier.part(self._turn.part)

    def begin(self) -> None:
        self._tier.lead(self._freshen)
        self._micro, self._norm = 0, None
        self.tables.enter(self._turn.step)
        super().begin()

    def _freshen(self) -> None:
        turn = self._turn
        if self._fresh != turn.step:
            self._served.fetch(turn.step if turn.together else 0, later=True)
            self._fresh = turn.step

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        super().backward(loss, weight, last)
        self.tables.take(counts=weight != 0.0)

    def next_part(self, tally: Tally, foreseen: float) -> int:
        self.tables.stage((self._turn.step, self._turn.part))
        self._arrivals.wait()
        self._mine = self._tier.add(tally)
        self._arrivals.used = self._tier.union(self._arrivals.used)
        more, state = self._tier.lead(lambda: self._deliver(foreseen))
        self._turn.adopt(state)
        if more:
            self._micro = 0
            self._arrivals.open_step()
        return self._tier.part(self._turn.part) if self._turn.together else -1

    def _deliver(self, foreseen: float) -> tuple[bool, list[Any]]:
        """What a unit has summed goes to the servers; then the part is done."""
        if self._tier.local.size > 1:
            claim = (self._turn.step, self._turn.part)
            for handle in [self._outgoing.stage(bucket, claim, self._micro) for bucket in self.buckets]:
                handle.wait()
        return self._turn.done(self._mine, foreseen, self._arrivals.bits), self._turn.state()

    def finish(self, tally: Tally) -> Tally:
        turn = self._turn
        if not turn.together or turn.over:  # over: the others have gone on, and there is nothing to add
            return self._mine if turn.part >= 0 else tally
        self._arrivals.bits = turn.tally["used"]
        return Tally(float(turn.tally["total"]), float(turn.tally["count"]))

    def norm(self) -> float:
        return self._tier.lead(self._find_norm)

    def _find_norm(self) -> float:
        turn = self._turn
        if turn.over or not (turn.together or self._compressor):
            return self._own_norm()
        # What comes out of a compressor is known to the servers only.
        found = self._served.squares(turn.step, turn.named_parts(), self._who.size)
        others = self.tables.squares(turn.step, turn.named_parts())
        known = [value["norm"] for value in [*found, *others] if isinstance(value, dict)]
        if known:  # another worker was first, and the update is made: all go by its number, if it is known
            self._norm = next((norm for norm in known if norm is not None), None)
            return self._own_norm() if self._norm is None else float(self._norm)
        self._norm = float((sum_of_slices(self.shards, found) + sum(n for (n,) in others)) ** 0.5)
        return self._norm

    def _own_norm(self) -> float:
        return float((sum_of_squares(self._gradients) + self.tables.own_squares()) ** 0.5)

    def update(self, factor: float, limit: float | None) -> None:
        self._tier.lead(lambda: self._update(factor, limit))

    def _update(self, factor: float, limit: float | None) -> None:
        turn = self._turn
        self._served.incoming.complete()  # who had no part to compute has not run the model
        if not turn.over:
            share = 1.0 if turn.together else turn.share
            how = {"factor": factor, "limit": limit, "share": share, "keep": self._recorded}
            args = {**self._named(), **how, "settings": settings_of(self.optimizer)}
            used = {name for name in self.trained if self._arrivals.used_name(name)}
            fresh = turn.step + 1 if turn.together and not self._served.ahead else None
            self.tables.send("apply", turn.step, args)
            turn.closed = self._served.apply(turn.step, args, used, fresh)
            self.tables.settle()
            self._fresh = -1 if fresh is None else fresh
        self._close_step()

    def _named(self) -> dict[str, Any]:
        return {"parts": self._turn.named_parts(), "floor": self._work.floor, "norm": self._norm}

    def rescale(self, by: float) -> None:
        self._outgoing.scale(by)

    def drop(self) -> None:
        self._tier.lead(self._drop)

    def _drop(self) -> None:
        turn = self._turn
        self._served.incoming.complete()
        self._outgoing.forget()
        if not turn.over:
            self.link.run(self._work.everywhere("drop", turn.step, self._named()))
            self._fresh = turn.step + 1 if turn.together else -1
        self._close_step()

    def _close_step(self) -> None:
        self.tables.leave()
        self._turn.close(self._arrivals.bits)
        self._fresh, self.saves = self._fresh if self._turn.together else -1, self._turn.closed
        sent = self.link.bytes_sent
        self._who.traffic.bytes_sent += sent - self._counted
        self._counted = sent

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        """Of a worker; servers hold (1 + state) × replicas / servers of it each, and gradients that wait."""
        del workers, state_per_parameter
        each = parameters * itemsize
        return Memory(each, each, 0.0)
