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
from collections.abc import Mapping

import torch

from shoal.compress.base import Compressor, Layout
from shoal.cost import NOTHING, Cost, ModelProfile
from shoal.errors import ConfigError, ServerRefused, ServersLost
from shoal.exchange.buckets.bucket_cost import (
    buckets_of,
    bytes_of,
    held_cost,
    reductions,
)
from shoal.exchange.buckets.by_hand import ByHand, changed_by_hand
from shoal.exchange.buckets.norms import sum_of_squares
from shoal.exchange.contract import JoinState, StepView, Tally, check_members
from shoal.exchange.embeddings.back_ends import ToServers
from shoal.exchange.embeddings.embedding_tables import Tables
from shoal.exchange.frozen import frozen_here_only
from shoal.exchange.ps_worker.bucket_shards import cut_shards, sum_of_slices
from shoal.exchange.ps_worker.claim import ClaimState, WorkClaim, from_plain, to_plain
from shoal.exchange.ps_worker.host_tier import Tier
from shoal.exchange.ps_worker.options import PsOptions
from shoal.exchange.ps_worker.push import Outgoing
from shoal.exchange.ps_worker.server_state import ServedState
from shoal.exchange.ps_worker.transfer import Transfer
from shoal.exchange.setup import BucketOptions, Setup
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.discovery import find_servers
from shoal.server.protocol.dense_messages import NamedParts, UpdateArguments
from shoal.server.protocol.encoded_gradient import describe_code
from shoal.server.protocol.ledger_answers import JoinMessage
from shoal.server.protocol.messages import Plain
from shoal.server.protocol.optimizer_description import describe, settings_of
from shoal.server.protocol.view import ROWS
from shoal.server.transport.shm_transport import new_id
from shoal.types import Promise
from shoal.world.buckets import Bucket
from shoal.world.hosts import group_ranks
from shoal.world.mesh import Mesh
from shoal.world.world import Handle, World

_LEDGER_BYTES = 4096
_ELSEWHERE = "servers hold the parameters, and what a worker changes is lost; use ddp"
_CPU = torch.device("cpu")


class Ps(ServedState):
    """Gradients go to servers, values come from them."""

    promise = Promise.EXACT
    summary = "servers hold the parameters and run the optimizer; its clock says how exact"
    Options = PsOptions
    whole_updates = True
    whole_models = True
    compresses = True
    uses_servers = True
    keeps_rows = True
    tables: Tables

    def __init__(self, setup: Setup, options: PsOptions) -> None:
        self._options = options
        self._who = setup.world
        self._recorded = setup.recorded
        self._micro = 0
        self._fresh = -1
        self._started = False
        self._join_state: JoinState | None = None
        self._loss_is_local = False
        self._saves = False
        self._counted = 0
        self._norm: float | None = None
        self._mine = Tally(0.0, 0.0)
        self._tier = Tier(setup.peers or setup.world, options.tier == "host")
        super().__init__(setup, BucketOptions(options.bucket_mb))
        self._by_hand = ByHand(self.trained, _ELSEWHERE, self._came)
        self._order_is_seen = True  # where parameters lie is agreed on before the first gradient
        self._description = describe(self.given)
        self.each = self.each and self._tier.local.size == 1  # a unit sums all its micro-batches first
        self._claim = WorkClaim(self._tier.units, options)
        self.tables = Tables(self.module, self.given, setup.seed, options.servers, 1 + len(self.shards))
        self.tables.check_aggregate(options.aggregate)
        self.begins = False
        if self._tier.leads:
            me = new_id()
            alone = self._tier.local.size == 1
            self._servers = find_servers(self._who, me, options.servers, options.at, options.keys, alone)
            self._join(me)
            self.complete_for(self.module)
        if self._tier.local.size > 1 and len(self.tables):
            raise ConfigError("SparseEmbedding and ps(tier=host) do not go together yet; leave tier out.")

    def connect(self, world: World) -> None:
        super().connect(World.alone(world.device))  # gradients go to servers, not to each other
        self.owners = world

    def _join(self, me: int) -> None:
        """Become one of the servers' workers."""
        options = self._options
        tables = self.tables
        alone = self._tier.local.size == 1
        # Numbers of shards follow from this order, on every worker alike: 0 is the ledger, then dense shards, then
        # rows.
        sizes = [_LEDGER_BYTES, *(shard.nbytes for shard in self.shards), *tables.sizes]
        kinds = ["ledger", *["dense"] * len(self.shards), *[ROWS] * len(tables.shards)]
        terms = (sizes, kinds, options.servers, options.copies, options.patience)
        self.link = Link(
            me, self._servers.address, self._servers.keys, self._tier.unit, terms, bool(options.at)
        )
        self._work = WorkerProtocol(self.link.client, self._tier.unit, range(1, len(sizes)))
        self._claim.connect(self.link, self._work)
        self._outgoing.connect(self.link, self._work)
        self._transfer = Transfer(
            self.link, self.shards, self.vectors, self.module, self.trained, later=alone
        )
        tables.connect(ToServers(self.link, self._work), self._claim)
        # The ledger compares it with that of other workers, so a worker with another model is refused at once.
        model: list[list[Plain]]
        model = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in self.module.named_parameters()]
        try:
            joined = self.link.run(self._work.join(model + tables.signature()))
        except (ServerRefused, ServersLost):
            if self.link.met:
                self.link.close()  # others must not wait for this worker
            raise
        self.begins = self._tier.unit == 0 and not joined["ready"]

    # Layout.

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

    def send(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        if self._tier.local.size > 1:
            return self._tier.reduce(bucket, [vectors[bucket.index] for vectors in self._theirs])
        self._outgoing.fill(bucket, vector)
        return self._outgoing.stage(bucket, (self._claim.step, self._claim.part), self._micro)

    def settle(self) -> None:
        self._micro += 1

    # The step.

    def start(self, step: int, state: JoinState | None) -> None:
        """Give the shards their first values, or wait until somebody has."""
        self._started = True
        self._tier.lead(lambda: self._start(step, to_plain(state)))
        # The servers keep it from now on; `prepare_save` fetches it.
        self.optimizer.state.clear()
        self._by_hand.note()

    def _start(self, step: int, join_state: JoinMessage) -> None:
        if not self.begins:
            self.first_values(self.link.run(self._work.wait_ready())["oldest"])
            return
        # Only the first worker comes here; shards take whatever comes first, so a second would do no harm.
        groups = {name: number for number, names in enumerate(self._groups) for name in names}
        aggregate, code = self._options.aggregate, describe_code(self._compressor)
        hold = self._claim.holds_parts
        taken = self._transfer.give(groups, self._description, aggregate, hold, code, step)
        self._transfer.give_state(self.optimizer, self.trained, step)
        self.tables.begin(step)
        if self.link.run(self._work.begin(step, join_state))["oldest"] == step and taken:
            self._fresh = step
            self._transfer.lend(step)

    @property
    def work(self) -> Ps:
        return self

    @property
    def loss_is_local(self) -> bool:
        return self._loss_is_local

    @property
    def saves(self) -> bool:
        return self._saves

    def next(self, after: int, stop: int | None) -> StepView | None:
        if not self._started:
            self.start(after, self._join_state)
        claim, join_state = self._claim, to_plain(self._join_state)
        end = after + 1 if stop is None else stop
        state = self._tier.lead(lambda: claim.state() if claim.claim(end, join_state) else None)
        if state is None:
            return None
        claim.adopt(state)
        self._loss_is_local = not claim.together
        self._saves = False
        return StepView(claim.step, self._tier.part(claim.part), from_plain(claim.join_state))

    def committed(self, view: StepView, state: JoinState) -> int:
        self._join_state = state
        return view.step + 1

    def final_sync(self) -> None:
        return

    def _came(self) -> Mapping[str, int]:
        return self._transfer.incoming.came if self._tier.leads else {}

    def take_over(self, name: str, home: torch.Tensor) -> None:
        del home
        raise changed_by_hand(name, _ELSEWHERE)

    def begin(self, view: StepView) -> None:
        self._by_hand.check()
        self._tier.lead(self._freshen)
        self._micro = 0
        self._norm = None
        self.tables.enter(self._claim.step)
        super().begin(view)

    def _freshen(self) -> None:
        claim = self._claim
        if self._fresh != claim.step:
            # `together`: values must hold every step before this one. Else (ssp, asp) whatever the servers have will
            # do; the ledger has bounded the staleness when it granted the claim.
            self._transfer.fetch(claim.step if claim.together else 0, later=True)
            self._fresh = claim.step

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        super().backward(loss, weight, last)
        self.tables.take(counts=weight != 0.0)

    def next_part(self, view: StepView, tally: Tally, expected_count: float) -> StepView:
        self.tables.stage((self._claim.step, self._claim.part))
        self._gradient_buckets.wait()
        self._mine = self._tier.add(tally)
        self._gradient_buckets.used = self._tier.union(self._gradient_buckets.used)
        more, state = self._tier.lead(lambda: self._deliver(expected_count))
        self._claim.adopt(state)
        if more:
            self._micro = 0
            self._gradient_buckets.open_step()
        part = self._tier.part(self._claim.part) if self._claim.together else -1
        return StepView(view.step, part)

    def _deliver(self, expected_count: float) -> tuple[bool, ClaimState]:
        """Send the unit's sum to the servers, and report the part as done."""
        if self._tier.local.size > 1:
            claim = (self._claim.step, self._claim.part)
            # Only now: in a host tier the sum of all local workers goes out, once for each bucket.
            for handle in [self._outgoing.stage(bucket, claim, self._micro) for bucket in self.buckets]:
                handle.wait()
        return self._claim.done(self._mine, expected_count, self._gradient_buckets.bits), self._claim.state()

    def finish(self, tally: Tally) -> Tally:
        claim = self._claim
        if not claim.together or claim.over:  # over: the others have gone on, and there is nothing to add
            return self._mine if claim.part >= 0 else tally
        had = list(self._gradient_buckets.used)
        # Which parameters had a gradient in any part; the ledger has joined the sets.
        self._gradient_buckets.bits = claim.tally["used"]
        self._check_frozen(had)
        return Tally(claim.tally["total"], claim.tally["count"])

    def _check_frozen(self, had: list[bool]) -> None:
        """Another worker's part had a gradient for what is frozen here: nobody froze it there."""
        buckets = self._gradient_buckets
        if had == buckets.used:
            return
        for name, mine, any_ in zip(buckets.names, had, buckets.used, strict=True):
            if any_ and not mine and not self.trained[name].requires_grad:
                raise frozen_here_only(name, True, self._who.size)

    def grad_norm(self) -> float:
        return self._tier.lead(self._find_norm)

    def _find_norm(self) -> float:
        claim = self._claim
        # Each part is clipped by itself where parts are updates of their own.
        if claim.over or not (claim.together or self._compressor):
            return self._own_norm()
        # What comes out of a compressor is known to the servers only.
        found = self._transfer.squares(claim.step, claim.named_parts(), self._who.size)
        others = self.tables.squares(claim.step, claim.named_parts())
        known = [value["norm"] for value in [*found, *others] if isinstance(value, dict)]
        if known:  # another worker was first, and the update is made: all go by its number, if it is known
            self._norm = next((norm for norm in known if norm is not None), None)
            return self._own_norm() if self._norm is None else float(self._norm)
        slices = [squares for squares in found if isinstance(squares, list)]
        of_rows = sum(squares[0] for squares in others if isinstance(squares, list))
        self._norm = float((sum_of_slices(self.shards, slices) + of_rows) ** 0.5)
        return self._norm

    def _own_norm(self) -> float:
        return float((sum_of_squares(self._gradients) + self.tables.own_squares()) ** 0.5)

    def apply(self, factor: float, clamp: float | None) -> None:
        self._tier.lead(lambda: self._apply(factor, clamp))

    def _apply(self, factor: float, clamp: float | None) -> None:
        claim = self._claim
        self._transfer.incoming.complete()  # who had no part to compute has not run the model
        if not claim.over:
            share = 1.0 if claim.together else claim.share
            args: UpdateArguments = {
                "parts": claim.named_parts(),
                "floor": self._work.floor,
                "norm": self._norm,
                "factor": factor,
                "limit": clamp,
                "share": share,
                "keep": self._recorded,
                "settings": settings_of(self.optimizer),
            }
            used = {name for name in self.trained if self._gradient_buckets.used_name(name)}
            # Ask for the next values with the update itself: it saves a round trip where they would be waited for
            # anyhow.
            fresh = claim.step + 1 if claim.together and not self._transfer.ahead else None
            # Rows and dense shards update side by side; both are waited for before the step is closed.
            self.tables.send("apply", claim.step, args)
            claim.closed = self._transfer.apply(claim.step, args, used, fresh)
            self.tables.settle()
            self._fresh = -1 if fresh is None else fresh

    def _named(self) -> NamedParts:
        return {"parts": self._claim.named_parts(), "floor": self._work.floor, "norm": self._norm}

    def rescale(self, by: float) -> None:
        self._outgoing.scale(by)

    def hand_out(self) -> None:
        """The servers have made the update; now the ledger knows that the step is over."""
        self._tier.lead(self._close_step)
        self._by_hand.note()

    def discard(self) -> None:
        self._tier.lead(self._discard)
        self.hand_out()

    def _discard(self) -> None:
        claim = self._claim
        self._transfer.incoming.complete()
        self._outgoing.forget()
        if not claim.over:
            self.link.run(self._work.everywhere("drop", claim.step, self._named()))
            # Nothing was applied, so the values that are here are those of the next step.
            self._fresh = claim.step + 1 if claim.together else -1

    def abort(self) -> None:
        self._gradient_buckets.abandon()
        self._outgoing.forget()
        if self._tier.leads:
            self.link.close()  # the ledger gives this worker's part to another

    def reopen(self, world: World, model_world: World) -> None:
        """Join the servers once more, who have all that was applied; work begins where the ledger says."""
        del model_world
        if self._tier.local.size > 1:
            raise ConfigError(
                "ps(tier=host) loses a whole host with one of its workers; start the host's workers anew."
            )
        check_members(self._members, world)
        self._lay_out()
        self._retarget()
        self._claim = WorkClaim(self._tier.units, self._options)
        self._started = False
        self._applied = False
        self._fresh = -1
        # Under a new number: the servers remember the last call of the old one, and late messages of it may still come.
        self._join(new_id())

    def _close_step(self) -> None:
        self.tables.leave()
        self._claim.close(self._gradient_buckets.bits)
        if not self._claim.together:
            self._fresh = -1
        self._saves = self._claim.closed
        # The link counts since it was made; traffic wants what came since last time.
        sent = self.link.bytes_sent
        self._who.traffic.bytes_sent += sent - self._counted
        self._counted = sent

    @classmethod
    def cost(
        cls, options: PsOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        """Cost of a worker: it sends gradients to servers, and some hundred bytes a shard to ask for values.

        Servers hold values and optimizer state, `copies` times, and gradients that wait for their update.
        """
        who = mesh.world if mesh.data.size == 1 else mesh.data  # an imagined worker has everybody in `data`
        together = group_ranks(who.hosts) if options.tier == "host" else [[rank] for rank in range(who.size)]
        unit = next(ranks for ranks in together if who.rank in ranks)
        buckets = buckets_of(profile, who.size, options.bucket_mb)
        exact = profile.deterministic and compressor is None
        shards = cut_shards(buckets, sys.maxsize if exact else int(options.bucket_mb * 2**20))
        sent, kept = sum(shard.nbytes for shard in shards), NOTHING
        if compressor is not None:
            layouts = [Layout(shard.size, shard.bucket.dtype, _CPU) for shard in shards]
            sent = sum(compressor.code(layout).nbytes() for layout in layouts)
            kept = sum((Cost(compressor.cost(layout, 1).resident) for layout in layouts), NOTHING)
        times = reductions(profile, compressor is not None) if len(unit) == 1 else 1
        leads = who.rank == unit[0]
        held = held_cost(profile, bytes_of(buckets) // len(unit), bytes_of(buckets), 0)
        return held + (kept if leads else NOTHING) + Cost(wire={"server": times * sent if leads else 0})
