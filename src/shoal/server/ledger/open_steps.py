"""What the ledger writes down: steps under way, their sums, and the whole as a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from shoal.server.protocol.ledger_answers import JoinMessage, Parameters, StepSum
from shoal.server.protocol.work_terms import TermsMessage

FREE = 0
"""In place of a worker: nobody has claimed the part, or who had is lost."""


@dataclass
class Done:
    """What a worker has reported of a part that it has finished."""

    total: float
    count: float
    used: str
    """A bit for every parameter, as hexadecimal text."""


@dataclass
class OpenStep:
    """A step that is under way."""

    claimed: dict[int, int] = field(default_factory=dict)
    """Part -> worker."""
    done: dict[int, Done] = field(default_factory=dict)


class LedgerState(TypedDict):
    """A snapshot of the ledger. Dictionaries with numbers as keys travel as lists of pairs."""

    terms: TermsMessage | None
    clocks: list[list[int]]
    """What each clock of the terms has learnt."""
    ready: bool
    oldest: int
    steps: list[tuple[int, list[tuple[int, int]], list[tuple[int, float, float, str]]]]
    """(step, (part, worker) of claimed parts, (part, total, count, used) of done ones)"""
    ranks: list[tuple[int, int]]
    lost: list[int]
    join_state: JoinMessage
    model: Parameters
    staleness: list[tuple[int, int]]
    recent: list[tuple[int, StepSum]]


def sum_of(step: OpenStep) -> StepSum:
    """What a step came to: sums in the order of parts, as every exchange takes them."""
    parts = sorted(step.done)
    used = 0
    for part in parts:
        used |= int(step.done[part].used or "0", 16)
    return {
        "parts": [[part, step.done[part].count] for part in parts],
        "total": sum(step.done[part].total for part in parts),
        "count": sum(step.done[part].count for part in parts),
        "used": f"{used:x}",
    }


def disagreement(first: Parameters, other: Parameters, rank: int) -> str:
    """The first parameter that two workers do not have alike."""
    for mine, theirs in zip(first or [], other or [], strict=False):
        if mine != theirs:
            return f"workers disagree on the model: one has {mine[:3]}, rank {rank} has {theirs[:3]}; build the same."
    return f"workers disagree on the model: one has {len(first or [])} parameters, rank {rank} has {len(other or [])}."
