"""Files in a private folder by which the launcher of a self-test and its workers know of each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.selftest.row import Row


@dataclass(frozen=True)
class Wanted:
    """What the workers are to do."""

    device: str
    kinds: Sequence[str]
    done: Sequence[str] = field(default_factory=list)
    """Checks that have a row already, by key: these workers take the place of others that failed in the last one."""


@dataclass(frozen=True)
class Inbox:
    """The folder."""

    folder: Path

    def ask(self, wanted: Wanted) -> None:
        (self.folder / "wanted.json").write_text(json.dumps(asdict(wanted)))
        (self.folder / "begun.json").unlink(missing_ok=True)

    def wanted(self) -> Wanted:
        return Wanted(**json.loads((self.folder / "wanted.json").read_text()))

    def begin(self, kind: str, subject: str) -> None:
        """A check begins: if no row follows, it is the one that failed."""
        (self.folder / "begun.json").write_text(json.dumps([kind, subject]))

    def begun(self) -> tuple[str, str] | None:
        """The check under way."""
        file = self.folder / "begun.json"
        if not file.exists():
            return None
        kind, subject = json.loads(file.read_text())
        return kind, subject

    def add(self, row: Row) -> None:
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        (self.folder / "begun.json").unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        file = self.folder / "rows.jsonl"
        return [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

    def describe(self, machine: dict[str, str]) -> None:
        (self.folder / "machine.json").write_text(json.dumps(machine))

    def machine(self) -> dict[str, str]:
        file = self.folder / "machine.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}
