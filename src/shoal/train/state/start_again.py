"""The first steps of workers that were started anew, because one of them was lost."""

from __future__ import annotations

from time import monotonic

from shoal.data.loader import Loader
from shoal.train.step_context import StepContext
from shoal.train.technique.journal import Journal
from shoal.world.launch import Again


def note_suspects(again: Again, context: StepContext, step: int) -> None:
    """Leave word of the samples of a step in which this worker was lost before: it may be lost again."""
    if again.rank != context.world.rank or again.step != step + 1:
        return
    loader = context.loader
    samples = ", ".join(map(str, loader.samples(step))) if isinstance(loader, Loader) else ""
    context.meter.page.suspects(samples)


def tell_return(again: Again, begin: int, journal: Journal, step_seconds: float) -> None:
    """A step is done after the restart: say from where, and how long it took since the loss."""
    now = monotonic()
    seconds = now - again.failed
    journal.recovered(again.failed, now - step_seconds)
    where = f"step {begin}" if begin else "the beginning"
    journal.say(f"going on from {where}, {seconds:.1f} s after the {'change' if again.grown else 'loss'}")
    facts = {
        "how": "all workers started again",
        "rank": again.rank if again.rank >= 0 else None,
        "after": begin,
    }
    journal.note("recovery", {**facts, "seconds": round(seconds, 3)})
