"""A whole parameter-server job on the simulated network, with faults by seed, and what must hold of its history.

The servers, the coordinator, the ledger, the dense shards and the workers' conversations are the real ones. Workers
compute nothing: the gradient of part p of step s is a vector with one 1, at s × parts + p, and the optimizer is plain
SGD with learning rate 1. So the values of a shard tell exactly which parts were applied, and how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.server.dense.dense_machine import Dense
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.node import Node
from shoal.server.protocol.messages import COORDINATOR, Message, MessageKind, Send
from shoal.server.protocol.state_machine import Machine, Operation
from shoal.server.protocol.view import View
from shoal.server.replication.coordinator import Coordinator
from shoal.testing.history import JobHistory, check_clock, check_linearised, counted_parts
from shoal.testing.network import Network
from shoal.testing.shape import JobShape
from shoal.testing.simulated_worker import SimulatedReader, SimulatedWorker

SILENCE = 2.0
"""Simulated seconds after which a silent process counts as gone."""


class SimulatedJob:
    """One run of a Shape."""

    def __init__(self, shape: JobShape) -> None:
        self.shape = shape
        self.network = Network(shape.seed, shape.weather)
        self.history = JobHistory()
        self.nodes: dict[int, Node] = {}
        self._next_id = 100
        self._generation = 0
        self.coordinator: Coordinator | None = None
        self.workers: dict[int, SimulatedWorker] = {}
        self._newest = 0
        self._partings = 0
        self._fuses: list[int] = []
        """Of the next new view so many messages leave the coordinator, and it ends."""
        self._start_coordinator()
        for slot in range(shape.servers):
            self._start_server(slot)
        for rank in range(shape.workers):
            self._start_worker(rank)
        for _ in range(shape.readers):
            self._start_reader()
        self._plan_faults()

    def run(self, seconds: float = 120.0) -> JobHistory:
        """Until all workers are done."""
        self.network.run(seconds, until=lambda: self.history.finished >= self.shape.workers)
        if self.history.finished < self.shape.workers:
            raise AssertionError(f"seed {self.shape.seed}: the job hangs after {seconds} simulated seconds")
        self.network.run(0.5)
        self.network.run(30.0, until=self._recovered)  # let copies catch up
        return self.history

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _start_coordinator(self) -> None:
        self._generation += 1
        generation = self._generation
        self.coordinator = self.network.start(
            COORDINATOR,
            lambda send: Coordinator(generation, self._cutting(send), SILENCE, self.shape.balance),
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
        self.workers[rank] = self.network.start(
            me, lambda send: SimulatedWorker(self, me, rank, self._parting(send))
        )

    def _start_reader(self) -> None:
        me = self._id()
        self.network.start(me, lambda send: SimulatedReader(self, me, send))

    def _plan_faults(self) -> None:
        shape = self.shape
        draw = self.network.random
        at = 0.3
        for _ in range(shape.server_kills):
            at += draw.uniform(0.02, 0.6)
            self._when_recovered(lambda: self._end_server(self._any_server()), at)
        faults = [
            (shape.server_stops, 0.3, 1.0, lambda: self._when_recovered(self._stop_server)),
            (shape.server_parts, 0.2, 0.8, self._plan_parting),
            (shape.server_mutes, 0.2, 0.8, lambda: self._when_recovered(self._mute_server)),
            (int(shape.servers > shape.replicas), 0.3, 1.5, self._make_busy),
            (shape.coordinator_kills, 0.2, 1.2, self._kill_coordinator),
            (shape.view_kills, 0.0, draw.choice([0.0, 1.5]), self._light_fuse),
            (shape.worker_kills, 0.3, 1.0, self._kill_worker),
            (shape.worker_stops, 0.2, 0.8, self._stop_worker),
            (shape.worker_hangs, 0.1, 0.5, self._hang_worker),
        ]
        for times, early, late, fault in faults:
            for _ in range(times):
                self.network.after(draw.uniform(early, late), fault)

    def _when_recovered(self, fault: Callable[[], None], after: float = 0.0, every: float = 0.1) -> None:
        """Do something as soon as it can lose nothing; not at all if the job is over first."""

        def look() -> None:
            if self.history.finished < self.shape.workers:
                if self._recovered():
                    fault()
                else:
                    self.network.after(every, look)

        self.network.after(after, look)

    def _recovered(self) -> bool:
        """Whether every shard is whole on as many servers as there should be: then one more may be lost."""
        view = self.coordinator.view if self.coordinator and self.network.alive(COORDINATOR) else View()
        if any(node.view.epoch > view.epoch for node in self.nodes.values()):
            return False  # a coordinator that has just taken over may not know yet who acts alone
        holders = [self._holders(view, shard, view.epoch) for shard in range(len(view.chains))]
        return bool(holders) and all(
            len(chain) >= self.shape.replicas and held == set(chain)
            for chain, held in zip(view.chains, holders, strict=True)
        )

    def _holders(self, view: View, shard: int, epoch: int = 0) -> set[int]:
        """Who of a shard's chain has it whole, knows that it counts, or an epoch, and is not about to be given up."""
        known = {} if self.coordinator is None else self.coordinator.servers
        silent = {s for s, server in known.items() if self.network.now - server.heard > SILENCE / 4}
        return {
            s
            for s in set(view.chains[shard]) - silent
            if self.network.works(s)
            and self.nodes[s].view.epoch >= max(epoch, view.since.get(s, epoch))
            and shard in self.nodes[s].whole()
        }

    def _any_server(self) -> int:
        assert self.coordinator is not None
        return self.network.random.choice(sorted(self.nodes.keys() & self.coordinator.view.addresses.keys()))

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
        self.network.stop(self._any_server(), self.network.random.uniform(0.5, 5.0))

    def _mute_server(self) -> None:
        """What a head says to a worker gets lost until the chain behind it is new; then it ends, and others know."""
        assert self.coordinator is not None
        head, *_, tail = self.network.random.choice(self.coordinator.view.chains)
        worker = self._busy_worker()
        if worker is not None:
            self.network.lose(head, worker.me, 10.0)
            self._end_server(tail)
            self._when_recovered(lambda: self._end_one_of([head]), every=0.01)

    def _plan_parting(self) -> None:
        self._partings += 1

    def _parting(self, send: Send) -> Send:
        """Sends as a worker does; its update may get to a head that cannot pass it on."""

        def sent(target: int, message: Message) -> None:
            updates = message.kind == MessageKind.CALL and message.meta[0] == "apply"
            if updates and self._partings and self._recovered():
                assert self.coordinator is not None
                self._partings -= 1
                self._part_servers(self.coordinator.view.chains[message.shard])
            send(target, message)

        return sent

    def _part_servers(self, chain: Sequence[int]) -> None:
        seconds = self.network.random.uniform(0.02, 0.5)
        self.network.lose(chain[0], chain[1], seconds)
        self.network.lose(chain[1], chain[0], seconds)
        if self.network.random.random() < 0.7:
            self.network.after(seconds, lambda: self._end_one_of(chain[:1]))

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
        """Let one server say that it has too much to do: a shard should move, and nothing be lost."""
        victim = self.network.random.choice([*sorted(self.nodes), 0])
        for who, node in self.nodes.items():
            node.load = lambda busy=float(who == victim): {"busy": busy}  # type: ignore[misc]
        if self.shape.balance < 1.0 and self.history.finished < self.shape.workers:
            self.network.after(2 * self.shape.balance, self._make_busy)

    def _kill_coordinator(self) -> None:
        self.network.kill(COORDINATOR)
        self.network.after(self.network.random.uniform(0.05, 1.0), self._start_coordinator)

    def _light_fuse(self) -> None:
        self._fuses.append(self.network.random.randrange(self.shape.servers + 1))

    def _cutting(self, send: Send) -> Send:
        """Sends as the coordinator does, which may end between two messages of a view that it publishes."""
        left: list[int] = []

        def cut(target: int, message: Message) -> None:
            if message.kind == MessageKind.VIEW and message.epoch > self._newest:
                self._newest = message.epoch
                left[:] = [self._fuses.pop()] if self._fuses else []
            if message.kind == MessageKind.VIEW and left:
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
        rank = worker.rank
        victim = worker.me
        self.network.kill(victim)
        if self.network.random.random() < 0.5:
            self.network.after(0.01, lambda: self._say_gone(victim))
        self.network.after(self.network.random.uniform(0.05, 3.0), lambda: self._start_worker(rank))


def check(job: SimulatedJob) -> None:
    """What must hold after any run, whatever happened in it."""
    shape = job.shape
    history = job.history
    label = f"seed {shape.seed}"
    assert job.coordinator is not None
    assert not job.coordinator.view.failed, f"{label}: {job.coordinator.view.failed}"
    counted = counted_parts(history, shape, label)
    wanted = [-float(number in counted) for number in range(shape.steps * shape.workers)]
    for shard in range(1, shape.shards + 1):
        for server in job.coordinator.view.chains[shard]:
            chain = job.nodes[server].chains[shard]
            values = chain.machine.answer(Operation("values", 0, {"applied": 0}))
            assert values is not None
            assert values.tensor is not None
            assert chain.whole, f"{label}: a copy of shard {shard} never became whole"
            assert values.tensor.tolist() == wanted, f"{label}: shard {shard} on {server}: lost or doubled"
    check_clock(history, shape, counted, label)
    check_linearised(history, shape.shards, label)
