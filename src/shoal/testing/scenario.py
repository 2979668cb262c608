"""A whole parameter-server job on the simulated network, with faults by seed, and what must hold of its history.

The servers, the coordinator, the ledger, the dense shards and the workers' conversations are the real ones. Workers
compute nothing: the gradient of part p of step s is a vector with one 1, at s × parts + p, and the optimizer is plain
SGD with learning rate 1. So the values of a shard tell exactly which parts were applied, and how often.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.server.chain import Send
from shoal.server.coordinator import Coordinator
from shoal.server.dense import Dense
from shoal.server.ledger import Ledger
from shoal.server.machine import Machine, Operation
from shoal.server.message import Kind, Message
from shoal.server.node import COORDINATOR, Node
from shoal.server.view import View
from shoal.testing.history import History, check_linearised
from shoal.testing.network import Network
from shoal.testing.shape import Shape
from shoal.testing.simulated_worker import SimulatedWorker

SILENCE = 2.0
"""Simulated seconds after which a silent process counts as gone."""


class Tide:
    """One run of a Shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.network = Network(shape.seed, shape.weather)
        self.history = History()
        self.nodes: dict[int, Node] = {}
        self._next_id = 100
        self._generation = 0
        self.coordinator: Coordinator | None = None
        self.workers: dict[int, SimulatedWorker] = {}
        self._newest = 0
        self._fuses: list[int] = []
        """Of the next new view so many messages leave the coordinator, and it ends."""
        self._start_coordinator()
        for slot in range(shape.servers):
            self._start_server(slot)
        for rank in range(shape.workers):
            self._start_worker(rank)
        self._plan_faults()

    def run(self, seconds: float = 120.0) -> History:
        """Until all workers are done."""
        self.network.run(seconds, until=lambda: self.history.finished >= self.shape.workers)
        if self.history.finished < self.shape.workers:
            raise AssertionError(f"seed {self.shape.seed}: the job hangs after {seconds} simulated seconds")
        self.network.run(0.5)
        self.network.run(30.0, until=self._recovered)  # let copies catch up
        return self.history

    # Processes.

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _start_coordinator(self) -> None:
        self._generation += 1
        generation = self._generation
        self.coordinator = self.network.start(
            COORDINATOR, lambda send: Coordinator(generation, self._cutting(send), SILENCE)
        )

    def _start_server(self, slot: int) -> None:
        me = self._id()
        self.nodes[me] = self.network.start(
            me, lambda send: Node(me, f"sim://{me}", self._machine, send, slot, SILENCE / 2)
        )

    def _machine(self, kind: str) -> Machine:
        return Ledger() if kind == "ledger" else Dense()

    def _start_worker(self, rank: int) -> None:
        me = self._id()
        self.workers[rank] = self.network.start(me, lambda send: SimulatedWorker(self, me, rank, send))

    # Faults.

    def _plan_faults(self) -> None:
        shape, draw = self.shape, self.network.random
        at = 0.3
        for _ in range(shape.server_kills):
            at += draw.uniform(0.02, 0.6)
            self.network.after(at, self._kill_server)
        for _ in range(shape.server_stops):
            self.network.after(draw.uniform(0.3, 1.0), self._stop_server)
        for _ in range(shape.server_parts):
            self.network.after(draw.uniform(0.2, 0.8), self._part_servers)
        if shape.servers > shape.replicas:
            self.network.after(draw.uniform(0.3, 1.5), self._make_busy)
        for _ in range(shape.coordinator_kills):
            self.network.after(draw.uniform(0.2, 1.2), self._kill_coordinator)
        for _ in range(shape.view_kills):
            self.network.after(draw.choice([0.0, draw.uniform(0.2, 1.5)]), self._light_fuse)
        for _ in range(shape.worker_kills):
            self.network.after(draw.uniform(0.3, 1.0), self._kill_worker)
        for _ in range(shape.worker_stops):
            self.network.after(draw.uniform(0.2, 0.8), self._stop_worker)
        for _ in range(shape.worker_hangs):
            self.network.after(draw.uniform(0.1, 0.5), self._hang_worker)

    def _recovered(self) -> bool:
        """Whether every shard is whole on as many servers as there should be: then one more may be lost."""
        if self.coordinator is None or not self.network.alive(COORDINATOR):
            return False
        view = self.coordinator.view
        holders = [self._holders(view, shard, view.epoch) for shard in range(len(view.chains))]
        return bool(holders) and all(
            len(chain) >= self.shape.replicas and held == set(chain)
            for chain, held in zip(view.chains, holders, strict=True)
        )

    def _holders(self, view: View, shard: int, epoch: int = 0) -> set[int]:
        """Who of a shard's chain is at work, has it whole, and has heard of an epoch."""
        return {
            s
            for s in view.chains[shard]
            if self.network.works(s) and self.nodes[s].view.epoch >= epoch and shard in self.nodes[s].whole()
        }

    def _kill_server(self) -> None:
        if self.history.finished >= self.shape.workers:
            return
        if not self._recovered():
            self.network.after(0.1, self._kill_server)
            return
        assert self.coordinator is not None
        self._end_server(self.network.random.choice(sorted(self.coordinator.view.addresses)))

    def _end_server(self, victim: int) -> None:
        slot = self.nodes[victim].slot
        self.network.kill(victim)
        del self.nodes[victim]
        self.history.kills += 1
        # Most often a launcher sees the end of its child at once; sometimes only the silence tells.
        if self.network.random.random() < 0.8:
            self.network.after(0.01, lambda: self._say_gone(victim))
        self.network.after(self.network.random.uniform(0.02, 0.5), lambda: self._start_server(slot))

    def _say_gone(self, victim: int) -> None:
        if self.coordinator is not None and self.network.alive(COORDINATOR):
            self.coordinator.gone(victim, self.network.now)

    def _stop_server(self) -> None:
        if not self._recovered():
            if self.history.finished < self.shape.workers:
                self.network.after(0.1, self._stop_server)
            return
        assert self.coordinator is not None
        victim = self.network.random.choice(sorted(self.coordinator.view.addresses))
        self.network.stop(victim, self.network.random.uniform(0.5, 5.0))

    def _part_servers(self) -> None:
        if not self._recovered():
            if self.history.finished < self.shape.workers:
                self.network.after(0.1, self._part_servers)
            return
        assert self.coordinator is not None
        head, following = self.network.random.choice(self.coordinator.view.chains)[:2]
        seconds = self.network.random.uniform(0.05, 0.5)
        self.network.part(head, following, seconds)
        if self.network.random.random() < 0.7:
            self.network.after(seconds, lambda: self._end_one_of([head]))

    def _end_one_of(self, servers: Sequence[int]) -> None:
        """End a server without which nothing is lost, if there is one."""
        assert self.coordinator is not None
        known = max((node.view for node in self.nodes.values()), key=lambda view: view.epoch)
        views = [view for view in (known, self.coordinator.view) if view.chains]
        victims = [
            s
            for s in servers
            if s in self.nodes
            and all(self._holders(view, n) - {s} for view in views for n in range(len(view.chains)))
        ]
        if victims:
            self._end_server(self.network.random.choice(victims))

    def _make_busy(self) -> None:
        """Let one server say that it has too much to do, for a while: a shard should move, and nothing be lost."""
        if self.nodes:
            victim = self.network.random.choice(sorted(self.nodes))
            self.nodes[victim].load = lambda: {"busy": 1.0}

    def _kill_coordinator(self) -> None:
        self.network.kill(COORDINATOR)
        self.network.after(self.network.random.uniform(0.05, 1.0), self._start_coordinator)

    def _light_fuse(self) -> None:
        self._fuses.append(self.network.random.randrange(self.shape.servers + 1))

    def _cutting(self, send: Send) -> Send:
        """Sends as the coordinator does, which may end between two messages of a view that it publishes."""
        left: list[int] = []

        def cut(target: int, message: Message) -> None:
            if message.kind == Kind.VIEW and message.epoch > self._newest:
                self._newest = message.epoch
                left[:] = [self._fuses.pop()] if self._fuses else []
            if message.kind == Kind.VIEW and left:
                left[0] -= 1
                if left[0] < 0:
                    left.clear()
                    self._cut()
            send(target, message)  # nothing leaves a process that has ended

        return cut

    def _cut(self) -> None:
        """The coordinator ends now, and at times a server with it: one without which nothing is lost."""
        self.history.cuts += 1
        if self.network.random.random() < 0.5:
            self._end_one_of(sorted(self.nodes))
        self._kill_coordinator()

    def _busy_worker(self) -> SimulatedWorker | None:
        busy = [w for _, w in sorted(self.workers.items()) if not w.finished and self.network.alive(w.me)]
        return self.network.random.choice(busy) if busy else None

    def _stop_worker(self) -> None:
        worker = self._busy_worker()
        if worker is not None:
            self.network.stop(worker.me, self.network.random.uniform(1.0, 3.0) * SILENCE)

    def _hang_worker(self) -> None:
        worker = self._busy_worker()
        if worker is not None:
            worker.hang = self.shape.patience * self.network.random.uniform(1.0, 4.0)

    def _kill_worker(self) -> None:
        worker = self._busy_worker()
        if worker is None:
            return
        rank, victim = worker.rank, worker.me
        self.network.kill(victim)
        if self.network.random.random() < 0.5:
            self.network.after(0.01, lambda: self._say_gone(victim))
        self.network.after(self.network.random.uniform(0.05, 3.0), lambda: self._start_worker(rank))


def check(tide: Tide) -> None:
    """What must hold after any run, whatever happened in it."""
    shape, history = tide.shape, tide.history
    label = f"seed {shape.seed}"
    assert tide.coordinator is not None
    assert not tide.coordinator.view.failed, f"{label}: {tide.coordinator.view.failed}"
    counted = _counted(tide)
    wanted = [-float(number in counted) for number in range(shape.steps * shape.workers)]
    for shard in range(1, shape.shards + 1):
        for server in tide.coordinator.view.chains[shard]:
            chain = tide.nodes[server].chains[shard]
            values = chain.machine.answer(Operation("values", 0, {"applied": 0}))
            assert values is not None
            assert values.tensor is not None
            assert chain.whole, f"{label}: a copy of shard {shard} never became whole"
            assert values.tensor.tolist() == wanted, f"{label}: shard {shard} on {server}: lost or doubled"
    for step, oldest in history.claims:
        window, _ = shape.terms.at(step)
        assert window < 0 or step - oldest <= window, f"{label}: a claim {step - oldest} steps ahead"
    for read in history.reads:
        window, _ = shape.terms.at(read.step)
        due = {n for n in counted if _due(shape, n // shape.workers, read.step)}
        assert due <= read.parts, f"{label}: a read for step {read.step} is older than {window} steps"
    check_linearised(history, shape.shards, label)


def _due(shape: Shape, step: int, reading: int) -> bool:
    """Whether an update of one step must be seen by who works on another: by its window, or because nobody goes on."""
    window, _ = shape.terms.at(reading)
    return (window >= 0 and step < reading - window) or (step < reading and shape.terms.at(step)[1])


def _counted(tide: Tide) -> set[int]:
    """The parts that updates named; where they go together, all updates of a step name the same, and enough."""
    shape, found = tide.shape, dict[int, set[tuple[int, ...]]]()
    for step, parts in tide.history.updates:
        found.setdefault(step, set()).add(parts)
    for step in range(shape.steps):
        named = found.get(step, set())
        if shape.terms.at(step)[1]:
            counts = {len(parts) for parts in named}
            assert len(named) == 1, f"seed {shape.seed}: updates of step {step} name different parts: {named}"
            assert counts == {shape.workers - shape.backup}, f"seed {shape.seed}: step {step} counts {counts}"
        else:
            alone = {(part,) for part in range(shape.workers)}
            assert named == alone, f"seed {shape.seed}: updates of step {step} are of {named}"
    return {step * shape.workers + part for step in found for parts in found[step] for part in parts}
