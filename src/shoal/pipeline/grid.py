"""A schedule as text: one line a rank, one column a unit of time."""

from __future__ import annotations

from shoal import pipeline
from shoal.pipeline.base import Action, ActionKind, Schedule
from shoal.pipeline.check_schedule import Simulation, Span, simulate

WIDE = 110
"""Cells get a space between them where the lines then stay within this many characters."""


def draw(name: str, ranks: int, microbatches: int) -> str:
    """The grid of a schedule, with its idle time and the activations it holds under it.

    >>> print(draw("1f1b", ranks=2, microbatches=3))
    1f1b: 2 ranks, 3 micro-batches, 12 units of time
    <BLANKLINE>
    0 | F0 F1 .  .  B0    F2 B1    .  B2
    1 | .  F0 B0    F1 B1    F2 B2    .  .
    <BLANKLINE>
    F forward, B backward, each with its micro-batch; . idle
    idle 25.0 % (by formula 25.0 %)
    activations held at once, by rank: 2 1 (of 3 micro-batches)
    """
    schedule = pipeline.TABLE.look_up(name)
    run = simulate(schedule, ranks, microbatches)
    rows = _rows(run, ranks, microbatches)
    title = f"{name}: {ranks} ranks, {microbatches} micro-batches, {int(run.makespan)} units of time"
    return "\n".join([title, "", *rows, "", *_notes(schedule, run, ranks, microbatches)])


def _rows(run: Simulation, ranks: int, microbatches: int) -> list[str]:
    digits = len(str(microbatches - 1))
    label = len(str(ranks - 1))
    room = label + 3 + int(run.makespan) * (digits + 2) <= WIDE
    width = digits + (2 if room else 1)
    return [
        f"{rank:>{label}} | {_row(spans, int(run.makespan), width, ranks)}".rstrip()
        for rank, spans in enumerate(run.spans)
    ]


def _row(spans: tuple[Span, ...], columns: int, width: int, ranks: int) -> str:
    idle = ".".ljust(width)
    row = ""
    now = 0
    for span in spans:
        row += idle * (int(span.start) - now)
        now = int(span.end)
        row += _cell(span.action, ranks).ljust(width * (now - int(span.start)))
    return row + idle * (columns - now)


def _cell(action: Action, ranks: int) -> str:
    """Small letters are a rank's second stage."""
    letter = action.kind.name if action.stage < ranks else action.kind.name.lower()
    return f"{letter}{action.micro}"


def _notes(schedule: type[Schedule], run: Simulation, ranks: int, microbatches: int) -> list[str]:
    words = {
        ActionKind.F: "forward",
        ActionKind.B: "backward",
        ActionKind.I: "backward of inputs",
        ActionKind.W: "of weights",
    }
    kinds = {span.action.kind for spans in run.spans for span in spans}
    legend = ", ".join(f"{kind.name} {word}" for kind, word in words.items() if kind in kinds)
    second = "; small letters: the rank's second stage" if schedule.stages_per_rank > 1 else ""
    of = f"{microbatches} micro-batches"
    if schedule.stages_per_rank > 1:
        of = f"{schedule.stages_per_rank} stages × {of}"
    return [
        f"{legend}, each with its micro-batch; . idle{second}",
        f"idle {run.idle:.1%} (by formula {schedule.bubble(ranks, microbatches):.1%})".replace("%", " %"),
        f"activations held at once, by rank: {' '.join(map(str, run.peaks))} (of {of})",
    ]
