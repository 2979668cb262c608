"""Steps under way, as the ledger writes them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FREE = 0
"""In place of a worker: nobody has claimed the part, or who had is lost."""


@dataclass
class Done:
    """What a finished part has told."""

    total: float
    count: float
    used: str
    """A bit for every parameter, as hexadecimal text."""


@dataclass
class Step:
    """A step that is under way."""

    claimed: dict[int, int] = field(default_factory=dict)
    """Part -> worker."""
    done: dict[int, Done] = field(default_factory=dict)


@dataclass
class WorkTerms:
    """What the workers have agreed on: how much work there is, and by which clock."""

    parts: int = 0
    windows: list[list[int]] = field(default_factory=list)
    """[from step, window, together]: the last that begins at or before a step holds for it; -1: no bound."""
    backup: int = 0
    """So many parts of a step need not be waited for, where parts are together."""

    def at(self, step: int) -> tuple[int, bool]:
        """The window, and whether parts are together."""
        found = [entry for entry in self.windows if entry[0] <= step][-1]
        return found[1], bool(found[2])


def sum_of(step: Step) -> dict[str, Any]:
    """What a step came to: sums in the order of parts, as every exchange takes them."""
    parts, used = sorted(step.done), 0
    for part in parts:
        used |= int(step.done[part].used or "0", 16)
    return {
        "parts": [[part, step.done[part].count] for part in parts],
        "total": sum(step.done[part].total for part in parts),
        "count": sum(step.done[part].count for part in parts),
        "used": f"{used:x}",
    }


def disagreement(first: Any, other: Any, rank: int) -> str:
    """The first parameter that two workers do not have alike."""
    for mine, theirs in zip(first or [], other or [], strict=False):
        if mine != theirs:
            return f"workers disagree on the model: one has {mine[:3]}, rank {rank} has {theirs[:3]}; build the same."
    return f"workers disagree on the model: one has {len(first or [])} parameters, rank {rank} has {len(other or [])}."
