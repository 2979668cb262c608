"""A whole parameter-server job on the simulated network, with faults by seed, and what must hold of its history.

The servers, the coordinator, the ledger, the dense shards and the workers' conversations are the real ones. Workers
compute nothing: the gradient of part p of step s is a vector with one 1, at s × parts + p, and the optimizer is plain
SGD with learning rate 1. So the values of a shard tell exactly which parts were applied, and how often.
"""

from __future__ import annotations

from shoal.server.coordinator import Coordinator
from shoal.server.dense import Dense
from shoal.server.ledger import Ledger
from shoal.server.machine import Machine, Operation
from shoal.server.node import COORDINATOR, Node
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
            COORDINATOR, lambda send: Coordinator(generation, send, SILENCE)
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
        if shape.servers > shape.replicas:
            self.network.after(draw.uniform(0.3, 1.5), self._make_busy)
        for _ in range(shape.coordinator_kills):
            self.network.after(draw.uniform(0.2, 1.2), self._kill_coordinator)
        for _ in range(shape.worker_kills):
            self.network.after(draw.uniform(0.3, 1.0), self._kill_worker)

    def _recovered(self) -> bool:
        """Whether every shard is whole on as many servers as there should be: then one more may be lost."""
        if self.coordinator is None or not self.network.alive(COORDINATOR):
            return False
        view = self.coordinator.view
        return bool(view.chains) and all(
            len(chain) >= self.shape.replicas
            and all(
                self.network.works(s)
                and self.nodes[s].view.epoch == view.epoch
                and shard in self.nodes[s].whole()
                for s in chain
            )
            for shard, chain in enumerate(view.chains)
        )

    def _kill_server(self) -> None:
        if self.history.finished >= self.shape.workers:
            return
        if not self._recovered():
            self.network.after(0.1, self._kill_server)
            return
        assert self.coordinator is not None
        victim = self.network.random.choice(sorted(self.coordinator.view.addresses))
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

    def _make_busy(self) -> None:
        """Let one server say that it has too much to do, for a while: a shard should move, and nothing be lost."""
        if self.nodes:
            victim = self.network.random.choice(sorted(self.nodes))
            self.nodes[victim].load = lambda: {"busy": 1.0}

    def _kill_coordinator(self) -> None:
        self.network.kill(COORDINATOR)
        self.network.after(self.network.random.uniform(0.05, 1.0), self._start_coordinator)

    def _kill_worker(self) -> None:
        busy = [
            r for r, worker in self.workers.items() if not worker.finished and self.network.alive(worker.me)
        ]
        if not busy:
            return
        rank = self.network.random.choice(sorted(busy))
        victim = self.workers[rank].me
        self.network.kill(victim)
        if self.network.random.random() < 0.5:
            self.network.after(0.01, lambda: self._say_gone(victim))
        self.network.after(self.network.random.uniform(0.05, 3.0), lambda: self._start_worker(rank))


def check(tide: Tide) -> None:
    """What must hold after any run, whatever happened in it."""
    shape, history = tide.shape, tide.history
    label = f"seed {shape.seed}"
    everything = frozenset(range(shape.steps * shape.workers))
    assert tide.coordinator is not None
    for shard in range(1, shape.shards + 1):
        for server in tide.coordinator.view.chains[shard]:
            chain = tide.nodes[server].chains[shard]
            values = chain.machine.answer(Operation("values", 0, {"applied": 0}))
            assert values is not None
            assert values.tensor is not None
            assert chain.whole, f"{label}: a copy of shard {shard} never became whole"
            wanted = [-1.0] * len(everything)
            assert values.tensor.tolist() == wanted, f"{label}: shard {shard} on {server}: lost or doubled"
    for step, oldest in history.claims:
        if shape.window >= 0:
            assert step - oldest <= shape.window, f"{label}: a claim {step - oldest} steps ahead"
    for read in history.reads:
        if shape.window >= 0:
            due = {n for n in everything if n // shape.workers < read.step - shape.window}
            assert due <= read.parts, (
                f"{label}: a read for step {read.step} is older than {shape.window} steps"
            )
    check_linearised(history, shape.shards, label)
