"""From the reports of steps to the shares of later ones: what carries the slot `balance` into a run.

Every few steps all workers exchange what they have measured, in one small collective. Each then decides by itself and
comes to the same. In between, a step costs one line in a list.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.balance.base import Balance, Basis, Sharer
from shoal.balance.deal import slowest
from shoal.balance.remembered import check_speeds, default_path, keep, key_of, stored_speeds
from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader
from shoal.exchange.contract import Exchange
from shoal.report.meter import peak_memory
from shoal.train.model.whole_model import ModelShape
from shoal.types import StepReport
from shoal.world.free_memory import free_memory
from shoal.world.mesh import Mesh
from shoal.world.world import World

RESERVE = 0.2
"""The part of a host's free memory that shares must leave alone."""


@dataclass(frozen=True)
class Change:
    """New shares."""

    step: int
    """The first with them, counted as reports do."""
    samples: tuple[int, ...]
    """Of a full step, for each replica."""
    gain: float
    """The part of the computing time that this should save."""

    def __str__(self) -> str:
        shares = "/".join(map(str, self.samples))
        return f"balance: {shares} samples from step {self.step} on, which should save {self.gain:.0%} of computing"

    def facts(self) -> dict[str, object]:
        """For the event log."""
        return {"from_step": self.step, "shares": list(self.samples), "gain": round(self.gain, 4)}


class MemoryHeadroom:
    """How many samples this worker has room for, judged by how its peak has grown since before the first step."""

    def __init__(self, neighbours: int) -> None:
        """`neighbours`: workers of this host."""
        self._before = peak_memory()
        self._neighbours = neighbours
        self._largest = 0.0

    def most(self, samples: float) -> float:
        """Now that it has had so many in a step; 0: nothing speaks against any number.

        All that has grown is put down to the samples, also what the optimizer holds: so it is too careful where memory
        is short, and of no effect elsewhere.
        """
        self._largest = max(self._largest, samples)
        grown = peak_memory() - self._before
        if grown <= 0:
            return 0.0
        mine = (1.0 - RESERVE) * free_memory() / self._neighbours
        return self._largest + mine * self._largest / grown


class Balancing:
    """The shares of a run. Every rank has this and calls it alike."""

    def __init__(
        self,
        chosen: Balance,
        mesh: Mesh,
        loader: Loader | StreamLoader,
        exchange: Exchange,
        key: str = "",
    ) -> None:
        """`key`: under which speeds are kept from run to run, if they are."""
        self._chosen = chosen
        self._mesh = mesh
        self._key = key
        self._loader = loader
        self._exchange = exchange
        feed = loader.feed
        self._grain = feed.accumulate
        """Samples are dealt out in so many, one for each micro-batch."""
        here = mesh.world.hosts[mesh.world.rank] if mesh.world.hosts else ""
        self._memory = MemoryHeadroom(max(1, list(mesh.world.hosts).count(here)))
        self._seen: list[tuple[float, float]] = []
        self._begun = False
        self._waited = exchange.waited
        self._sharer: Sharer | None = None
        self._now: tuple[int, ...] = ()
        shares = chosen.given
        if mesh.stages.size > 1:
            return  # micro-batches of a pipeline are equal; its stages are not
        if shares and feed.parts > 1 and feed.parts % len(shares) == 0:
            loader.reshare(0, shares)  # among workers, or in one process that computes what they would
        elif chosen.measures and feed.size > 1:
            self._start(0, self._known())

    @property
    def speeds(self) -> list[float] | None:
        """Of each replica, as far as they are known."""
        return list(self._sharer.speeds) or None if self._sharer is not None else None

    def go_on(self, step: int, speeds: object) -> None:
        """Begin at a step with the speeds of a checkpoint, if they are of as many replicas."""
        known = check_speeds(speeds, self._loader.feed.size)
        if known and self._sharer is not None:
            self._start(step, known)

    def after(self, report: StepReport) -> Change | None:
        """A step is over; all ranks hear of it, and at the same steps exchange what they have seen."""
        sharer, waited = self._sharer, self._exchange.waited
        if sharer is None or sharer.window == 0:
            return None
        seconds = report.compute_seconds + report.data_seconds - (waited - self._waited)
        self._waited = waited
        # A first step sets things up; a short one tells more of what every step costs than of samples.
        if not self._begun or report.samples < self._loader.feed.global_batch:
            self._begun = True
            return None
        self._seen.append((float(self._loader.handed), max(seconds, 0.0)))
        if len(self._seen) < sharer.window:
            return None
        self._tell(sharer)
        self._seen.clear()
        return None if sharer.shares == self._now else self._act(sharer, report.number)

    def close(self) -> None:
        """Keep what has been learned, where that is wanted."""
        if not (self._chosen.remembers and self._key and self._mesh.world.rank == 0 and self.speeds):
            return
        by_rank = [self.speeds[self._mesh.place_of(rank)[0]] for rank in range(self._mesh.world.size)]
        try:
            keep(default_path(), self._key, by_rank, time.time())
        except OSError as error:
            print(f"shoal: speeds could not be kept ({error}).", file=sys.stderr)

    def _start(self, step: int, known: tuple[float, ...]) -> None:
        feed = self._loader.feed
        units = max(feed.global_batch // self._grain, feed.size)
        basis = Basis(feed.size, units, self._loader.lag, known, self._limits(()))
        sharer = self._sharer = self._chosen.start(basis)
        self._now = sharer.shares
        self._loader.reshare(step, sharer.shares)

    def _known(self) -> tuple[float, ...]:
        world = self._mesh.world
        by_rank = known_speeds(self._key, world) if self._chosen.remembers else ()
        return self._by_replica(by_rank) if by_rank else ()

    def _by_replica(self, by_rank: Sequence[float]) -> tuple[float, ...]:
        """A replica is as fast, or has as much room, as the least of its workers."""
        found = [math.inf] * self._loader.feed.size
        for rank, value in enumerate(by_rank):
            replica = self._mesh.place_of(rank)[0]
            found[replica] = min(found[replica], value)
        return tuple(found)

    def _limits(self, measured: Sequence[float]) -> tuple[float, ...]:
        """Units that each replica may get: as the user says, and as memory allows."""
        given, size = self._chosen.limits, self._loader.feed.size
        wanted = given * size if len(given) == 1 else given or (math.inf,) * size
        room = measured or (math.inf,) * size
        return tuple([min(a, b) / self._grain for a, b in zip(wanted, room, strict=True)])

    def _tell(self, sharer: Sharer) -> None:
        """One collective: the steps of this worker, and its room."""
        size = self._loader.feed.size
        most = self._memory.most(max(samples for samples, _ in self._seen))
        mine = [number for step in self._seen for number in step]
        rows = self._mesh.world.gather_numbers([*mine, most]).tolist()
        sharer.limit(self._limits(self._by_replica([row[-1] or math.inf for row in rows])))
        for at in range(0, len(mine), 2):
            samples, seconds = [0.0] * size, [0.0] * size
            for rank, row in enumerate(rows):
                replica = self._mesh.place_of(rank)[0]
                samples[replica], seconds[replica] = row[at], max(seconds[replica], row[at + 1])
            sharer.observe([some / self._grain for some in samples], seconds)

    def _act(self, sharer: Sharer, done: int) -> Change:
        step, speeds = done + self._loader.lag, sharer.speeds
        gain = 1.0 - slowest(sharer.shares, speeds) / slowest(self._now, speeds)
        self._now = sharer.shares
        self._loader.reshare(step, sharer.shares)
        return Change(step + 1, tuple(self._grain * share for share in sharer.shares), gain)


def known_speeds(key: str, world: World) -> tuple[float, ...]:
    """What the first worker remembers of earlier runs, for all: one speed a worker, or nothing. Collective."""
    found = stored_speeds(default_path(), key, world.size) if world.rank == 0 else ()
    return tuple(world.gather_values(list(found))[0])


def key_for(shape: ModelShape, world: World) -> str:
    """The key of a model on these workers' hosts."""
    # The first two words of a host are its name and its kind; the others change with every boot.
    hosts = [" ".join(host.split()[:2]) for host in world.hosts]
    return key_of({name: shape.sizes[name] for name in shape.parameters}, hosts)


def stage_speeds(chosen: Balance, mesh: Mesh, key: str, seconds: Sequence[float]) -> Sequence[float]:
    """The speed of each rank of a pipeline, from the seconds that a pass of the whole model took each worker.

    All pipelines are divided alike, so a stage is as fast as the slowest of those who have it.
    """
    if chosen.given or not chosen.measures or mesh.world.size == 1:
        return chosen.given
    by_rank: Sequence[float] = [1.0 / took for took in seconds]
    if chosen.remembers:
        by_rank = known_speeds(key, mesh.world)
        if not by_rank and mesh.world.rank == 0:
            text = "no speeds are kept of this model on these machines; stages get like costs"
            print(f"shoal: balance: {text}. Train once under ddp with the same balance.", file=sys.stderr)
    if len(by_rank) != mesh.world.size:
        return ()
    found = [math.inf] * mesh.stages.size
    for rank, speed in enumerate(by_rank):
        stage = mesh.place_of(rank)[1]
        found[stage] = min(found[stage], speed)
    return found
