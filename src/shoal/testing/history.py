"""What simulated workers saw, and whether it fits one order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from shoal.testing.shape import JobShape


@dataclass
class Read:
    """The values of a shard as a worker saw them."""

    shard: int
    sent: float
    answered: float
    step: int
    """The step it was read for; -1: for none."""
    parts: frozenset[int]


@dataclass
class WriteEvent:
    """A part applied to a shard; never answered if its worker was lost first."""

    shard: int
    sent: float
    answered: float
    number: int


@dataclass
class JobHistory:
    """What the workers saw."""

    reads: list[Read] = field(default_factory=list)
    writes: list[WriteEvent] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)
    """(step, oldest step that was not over) of every claim."""
    updates: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(step, the parts named) of every update that was asked for."""
    computed: list[tuple[int, int]] = field(default_factory=list)
    """(step, part) of every gradient that was sent: whose worker seemed lost is there twice."""
    finished: int = 0
    kills: int = 0
    cuts: int = 0
    """Coordinators that have ended between two messages of one view."""
    longest: float = 0.0
    """The longest time between two answers that any worker saw."""


def check_linearised(history: JobHistory, shards: int, label: str) -> None:
    """Reads and writes of each shard fit one order that agrees with time.

    Values only grow by parts, so three things suffice: a read has all that was answered before it was asked, nothing
    that was asked after it was answered, and of two reads one contains the other, the later one the earlier's.
    """
    for shard in range(1, shards + 1):
        writes = [write for write in history.writes if write.shard == shard]
        first: dict[int, float] = {}
        acked: dict[int, float] = {}
        for write in writes:
            first[write.number] = min(first.get(write.number, float("inf")), write.sent)
            acked[write.number] = min(acked.get(write.number, float("inf")), write.answered)
        reads = sorted((read for read in history.reads if read.shard == shard), key=lambda r: len(r.parts))
        for read in reads:
            missing = {n for n, time in acked.items() if time < read.sent} - read.parts
            assert not missing, f"{label}: a read of shard {shard} misses acknowledged parts {missing}"
            early = {n for n in read.parts if first.get(n, float("inf")) > read.answered}
            assert not early, f"{label}: a read of shard {shard} shows parts {early} before they were sent"
        for small, large in pairwise(reads):
            assert small.parts <= large.parts, f"{label}: two reads of shard {shard} contradict each other"
            if large.answered < small.sent:
                assert small.parts == large.parts, f"{label}: a later read of shard {shard} shows less"


def counted_parts(history: JobHistory, shape: JobShape, label: str) -> set[int]:
    """The parts that updates named; where they go together, all updates of a step name the same, and enough."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for step, parts in history.updates:
        found.setdefault(step, set()).add(parts)
    for step in range(shape.steps):
        named = found.get(step, set())
        if shape.terms.clock(step).together:
            counts = {len(parts) for parts in named}
            assert len(named) == 1, f"{label}: updates of step {step} name different parts: {named}"
            assert counts == {shape.workers - shape.backup}, f"{label}: step {step} counts {counts} parts"
        else:
            alone = {(part,) for part in range(shape.workers)}
            assert named == alone, f"{label}: updates of step {step} are of {named}"
    return {step * shape.workers + part for step in found for parts in found[step] for part in parts}


def check_clock(history: JobHistory, shape: JobShape, counted: set[int], label: str) -> None:
    """Nobody was further ahead than the clock of that step allows, or worked with values that were older."""
    for step, oldest in history.claims:
        bound = shape.terms.clock(step).bound
        assert bound is None or step - oldest <= bound, f"{label}: a claim {step - oldest} steps ahead"
    for read in history.reads:
        if read.step >= 0:
            due = {n for n in counted if _is_due(shape, n // shape.workers, read.step)}
            assert due <= read.parts, f"{label}: a read for step {read.step} is older than its clock allows"


def _is_due(shape: JobShape, step: int, reading: int) -> bool:
    """Whether who works on one step must see another's updates: by its bound, or because nobody goes on without."""
    bound = shape.terms.clock(reading).bound
    return (bound is not None and step < reading - bound) or (
        step < reading and shape.terms.clock(step).together
    )
