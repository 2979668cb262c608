"""What a benchmark finds, as plain values: sections of rows, goals and notes, and the JSON that they are kept in.

A section is one table. It carries where it was measured, so one file may hold sections of several days and machines:
each keeps its own date until it is measured again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report.origin import Origin

Cell = float | int | str | None
"""None: not measured."""
Row = list[Cell]


@dataclass(frozen=True)
class Column:
    """How one column is called and shown."""

    name: str
    form: str = "{}"
    """A format such as `{:.1f}` or `{:.2f} ×`; or `seconds` or `bytes`, which choose their unit."""


@dataclass(frozen=True)
class Goal:
    """A figure beside what it should be."""

    what: str
    found: float
    goal: float
    least: bool = False
    """Whether the figure should be at least the goal; else at most."""

    @property
    def met(self) -> bool:
        """
        >>> Goal("time / peer's", 0.9, 1.0).met, Goal("speed / peer's", 0.9, 1.0, least=True).met
        (True, False)
        """
        return self.found >= self.goal if self.least else self.found <= self.goal


@dataclass(frozen=True)
class Section:
    """One table, with the goals that are checked on it."""

    title: str
    columns: Sequence[Column] = ()
    rows: Sequence[Sequence[Cell]] = ()
    goals: Sequence[Goal] = ()
    notes: Sequence[str] = ()
    part: str = ""
    """Which part of its benchmark it belongs to, where parts can be measured alone."""
    raw: Any = None
    """All that was measured, as plain values, where something is drawn from it later."""
    origin: Origin | None = None

    @property
    def missed(self) -> int:
        """How many goals are not met."""
        return sum(not goal.met for goal in self.goals)


@dataclass(frozen=True)
class Result:
    """All sections of one benchmark."""

    benchmark: str
    sections: Sequence[Section] = field(default_factory=list)

    def replace_parts(self, fresh: Iterable[Section]) -> Result:
        """The same with some parts measured anew, in their old places.

        >>> old = Result("x", [Section("a", part="1"), Section("b", part="2"), Section("c", part="1")])
        >>> [s.title for s in old.replace_parts([Section("d", part="1")]).sections]
        ['d', 'b']
        """
        waiting: dict[str, list[Section]] = {}
        for section in fresh:
            waiting.setdefault(section.part, []).append(section)
        gone = set(waiting)
        merged: list[Section] = []
        for section in self.sections:
            if section.part in gone:
                merged += waiting.pop(section.part, [])
            else:
                merged.append(section)
        merged += [section for sections in waiting.values() for section in sections]
        return replace(self, sections=merged)

    def write(self, path: Path) -> None:
        """As JSON, each row of a table on a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        # Lists of plain values; a string of JSON holds no line break.
        text = re.sub(r"\[\n[^][{}]*\n *\]", lambda found: re.sub(r"\n *", "", found[0]), text)
        path.write_text(text + "\n")


def read_result(path: Path) -> Result:
    """Read back what `Result.write` wrote."""
    found = json.loads(path.read_text())
    sections = [
        Section(
            **{
                **section,
                "columns": [Column(**column) for column in section["columns"]],
                "goals": [Goal(**goal) for goal in section["goals"]],
                "origin": Origin(**section["origin"]) if section["origin"] else None,
            }
        )
        for section in found["sections"]
    ]
    return Result(found["benchmark"], sections)
