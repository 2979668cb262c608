"""A self-test as a table, a verdict, and a file to attach to a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.selftest.drive import Found
from shoal.selftest.row import Row

FORMAT = 1
WIDE = 88
"""Characters of a sentence in the table; the file has all of it."""


def verdict(found: Found, seconds: float) -> str:
    """The last line.

    >>> print(verdict(Found({"cards": "none"}, 2, [Row("memory", "ddp", "ok", "")]), 3.0))
    PASSED: 1 checks are ok and 0 were left out, with 2 workers (cards: none), in 3 s.
    """
    counts = Counter(row.verdict for row in found.rows)
    where = (
        f"with {found.workers} workers (cards: {found.machine.get('cards', 'unknown')}), in {seconds:.0f} s."
    )
    if counts["failed"]:
        return f"FAILED: {counts['failed']} of {len(found.rows)} checks failed, {where}"
    return f"PASSED: {counts['ok']} checks are ok and {counts['left out']} were left out, {where}"


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verdict == "failed"]


def table_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Columns of text: one line for each check, in the order in which they were made."""
    return [["check", "of", "verdict", ""], *([r.kind, r.subject, r.verdict, _short(r.said)] for r in rows)]


def write(file: Path, found: Found, seconds: float) -> None:
    """Everything, as JSON."""
    content = {
        "format": FORMAT,
        "machine": found.machine,
        "workers": found.workers,
        "verdict": verdict(found, seconds),
        "rows": [asdict(row) for row in found.rows],
    }
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _short(said: str) -> str:
    line = said.partition("\n")[0]
    return line if len(line) <= WIDE else f"{line[: WIDE - 3]}..."
