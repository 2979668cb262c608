"""A call that belongs to every rank, what proves that two ranks do not make the same ones, and the sentence for it.

A rank's face calls are one sequence: steps, and between them calls such as `run.evaluate`, which are numbered. Two
facts about two ranks contradict each other where their sequences cannot be the same: "call 3 came after 5 steps" here,
and "step 6 came, and there were 2 calls so far" there. Facts do not age, so it does not matter when each was learned;
and a rank that is merely slow contradicts nobody.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[2]) + os.sep
LOOP = "run.steps"
END_OF_LOOP = "the end of run.steps"


@dataclass(frozen=True)
class Call:
    """A call that a rank waits in for the others, or the end of its script."""

    rank: int
    number: int
    """Calls of this rank so far, with this one; the end of a script is none."""
    rounds: tuple[int, ...]
    """Steps that it has begun, by Run of the script; where workers may leave steps out, meetings of all of them."""
    step: int
    """Steps that the Run of this call has begun."""
    what: str
    """As "run.evaluate of 100 samples"; empty for the end of a script."""
    where: str
    """File and line of the script."""

    @property
    def ended(self) -> bool:
        return not self.what

    def __str__(self) -> str:
        after = f"after step {self.step}" if self.step else "before the first step"
        if self.ended:
            return f"rank {self.rank} has ended its script {after}"
        does = "is at" if self.what == END_OF_LOOP else "calls"
        return f"rank {self.rank} {does} {self.what} at {self.where} {after}"

    def passed_by(self, rounds: Sequence[int], number: int) -> int | None:
        """The Run in which a rank that has begun so much, and made `number` calls, has gone past this one; or None."""
        if number >= self.number and not self.ended:
            return None
        pairs = enumerate(zip(rounds, self.rounds, strict=False))
        return next((run for run, (theirs, mine) in pairs if theirs > mine), None)


def different(first: str, second: str, kinds: Sequence[str]) -> str:
    """The sentence for two ranks that do not make the same calls, each in its words."""
    remedy = (
        "call it on every rank after the same step, and keep only what uses its answer under `if rank == 0`"
    )
    if any(not kind or kind == END_OF_LOOP or kind.startswith(LOOP) for kind in kinds):
        remedy = "run the same number of steps on every rank, and leave the loop at the same step"
    return f"ranks make different calls: {first}, and {second}; {remedy}."


def caller(frame: FrameType | None, running: bool = False) -> str:
    """File and line of the script at which it has called Shoal; `running`: of another thread, wherever it is now."""
    if running:  # the script's own code may run within a step (a loss, a data set): look for the step first
        inner = frame
        while inner is not None and not inner.f_code.co_filename.startswith(PACKAGE + "train"):
            inner = inner.f_back
        frame = inner or frame
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    path = Path(frame.f_code.co_filename)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{frame.f_lineno}"
