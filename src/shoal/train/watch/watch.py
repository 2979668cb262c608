"""What watches a run between two steps, and what it tells the journal. Every rank has it and calls it alike."""

from __future__ import annotations

import socket
from math import isfinite
from statistics import median
from time import monotonic

from shoal.errors import ReplicasDiffer
from shoal.train.step_context import StepContext
from shoal.train.technique.journal import Journal
from shoal.train.watch.replicas import Replicas
from shoal.train.watch.skew import compare_clocks
from shoal.train.watch.stragglers import WINDOW, Row, Sentence, Stragglers
from shoal.types import StepReport

CLOCKS = 64
"""Hosts compare their clocks at the first look, and at every look of this number."""


class Watch:
    """Stragglers, clocks, replicas, skipped steps.

    Who meets whom, and when, follows from the number of the step alone: a rank that joins late does what the others do.
    """

    def __init__(self, context: StepContext, check_replicas: int | None) -> None:
        """`check_replicas`: compare replicas after so many steps, and multiples of them."""
        world, mesh = context.world, context.mesh
        self._context = context
        self._exchange = context.exchange
        self._apart = len(set(world.hosts)) > 1
        self._meets = world.size > 1 and not context.exchange.uses_servers
        meeting = context.exchange.meeting_interval
        self._every = meeting * -(-WINDOW // meeting)
        places = [mesh.place_of(rank)[1:] for rank in range(world.size)] if self._meets else []
        name = socket.gethostname()
        # As the header of each rank's log calls its host; `World.hosts` are keys of shared memory.
        self._names = world.gather_values(name) if self._meets and self._apart else [name] * world.size
        self._stragglers = Stragglers([(stage, part) for stage, part in places], self._names)
        self._seconds: list[float] = []
        self._waited = context.exchange.waited
        replicated = check_replicas is not None and self._meets and mesh.data.size > 1
        self._check = check_replicas if replicated else None
        self._replicas = Replicas(context.exchange, mesh)

    def _clocks(self, journal: Journal) -> None:
        for clock in compare_clocks(self._context.world):
            host = self._names[clock.rank]
            facts = {"host": host, "offset": round(clock.offset, 6), "error": round(clock.error, 6)}
            first = self._names[0]
            apart = abs(clock.offset) > 1.0 + clock.error
            ahead = "behind" if clock.offset > 0 else "ahead of"
            text = f"the clock of host {host} (rank {clock.rank}) is {abs(clock.offset):.1f} s {ahead} that of {first}"
            journal.tell("clock", facts | {"reference": first}, text if apart else "")

    def after(self, report: StepReport, journal: Journal) -> None:
        """A step is over. Collective after some of them."""
        context = self._context
        waited = self._exchange.waited
        self._seconds.append(report.compute_seconds - (waited - self._waited))
        self._waited = waited
        if context.trouble:
            journal.say(context.trouble)
            context.trouble = ""
        if self._meets and report.number % self._every == 0:
            self._look(report.number, journal)
            if self._apart and (report.number == self._every or report.number % (CLOCKS * self._every) == 0):
                self._clocks(journal)
        if self._check is not None and report.number % self._check == 0:
            self._compare(report.number, journal)

    def _look(self, step: int, journal: Journal) -> None:
        tally = self._context.tally
        loss = tally.total / tally.count if tally.count > 0 else 0.0
        seconds = max(0.0, median(self._seconds)) if self._seconds else 0.0
        self._seconds.clear()
        rows = self._context.world.gather_numbers([seconds, loss if isfinite(loss) else 0.0]).tolist()
        if self._context.world.rank == 0:
            for said in self._stragglers.see(step, [Row(*row) for row in rows], monotonic()):
                _tell(journal, said)

    def _compare(self, step: int, journal: Journal) -> None:
        try:
            found = self._replicas.compare(step)
        except ReplicasDiffer as error:
            journal.tell("state_hash", {"after": step, "equal": False, "why": str(error)}, "")
            raise
        if found is None:
            journal.tell("state_hash", {"after": step, "equal": True}, "")
            return
        ranks = ", ".join(map(str, found.ranks))
        who = f"rank {ranks} held" if len(found.ranks) == 1 else f"ranks {ranks} held"
        why = f"{who} other values of {found.name} than the others (the first of {found.count} tensors)"
        facts = {"after": step, "equal": False, "rank": found.ranks[0], "why": why}
        text = f"after step {step} {why}; it has those of the majority now: look at that host's memory (`dmesg`, ECC)"
        journal.tell("state_hash", facts, text)


def _tell(journal: Journal, said: Sentence) -> None:
    if said.event:
        journal.tell(said.event, said.facts, said.text)
    else:
        journal.say(said.text)
