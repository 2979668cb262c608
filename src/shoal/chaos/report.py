"""The tables of `shoal chaos`, and its verdict."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.chaos.drive import Outcome
from shoal.chaos.schedule import KINDS


def draw(outcome: Outcome, console: Console) -> None:
    """What struck, and what was checked."""
    faults = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("fault", "struck", "next step after (median)", "longest"):
        faults.add_column(name, justify="left" if name == "fault" else "right")
    for kind in KINDS:
        planned = [fault for fault in outcome.schedule.faults if fault.kind == kind]
        if not planned:
            continue
        times = [each.seconds for each in outcome.struck if each.fault.kind == kind and each.seconds >= 0]
        struck = len([each for each in outcome.struck if each.fault.kind == kind])
        shown = [f"{median(times):.2f} s", f"{max(times):.2f} s"] if times else ["", ""]
        faults.add_row(kind, f"{struck} of {len(planned)}", *shown)
    console.print(faults)
    console.print()
    checks = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("checked", "", "found"):
        checks.add_column(name)
    for row in outcome.rows:
        word = Text("ok", "green") if row.good else Text("WRONG", "bold red")
        checks.add_row(row.name, word, Text(row.said))
    console.print(checks)


def verdict(outcome: Outcome) -> str:
    """One sentence."""
    schedule = outcome.schedule
    took = f"{outcome.seconds:.1f} s, undisturbed {outcome.plain_seconds:.1f} s"
    what = f"seed {schedule.seed}, {len(schedule.faults)} faults, {schedule.steps} steps, {schedule.workers} workers"
    bad = [row.name for row in outcome.rows if not row.good]
    if bad:
        return f"WRONG: {', '.join(bad)} ({what}; {took})."
    return f"Nothing was lost: {what}; {took}."
