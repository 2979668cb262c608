"""Published runs beside what is predicted of them, after one calibration for each kind of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.paper.achieved import Achieved
from shoal.plan.paper.fit import Measured, fit, predicted
from shoal.plan.paper.published import Rows, rank_agreement


@dataclass(frozen=True)
class Replay:
    """The runs of one kind of hardware."""

    hardware: str
    achieved: Achieved
    """Fitted to all of them."""
    runs: Sequence[Measured]
    predicted: Sequence[float]
    held_out: float | None
    """The mean error of each half, when only the other half was fitted to; None of too few runs."""

    @property
    def errors(self) -> list[float]:
        """|predicted / measured - 1| of each run."""
        return [abs(p / run.seconds - 1) for p, run in zip(self.predicted, self.runs, strict=True)]

    @property
    def mean(self) -> float:
        """Of the errors."""
        return sum(self.errors) / len(self.runs)

    @property
    def order(self) -> float:
        """Kendall's tau of predicted and measured times."""
        return rank_agreement([run.seconds for run in self.runs], self.predicted)


_HALVES = 6
"""Runs that are enough to fit to half of them."""


def replay(rows: Rows) -> list[Replay]:
    """Every kind of hardware for itself."""
    made = []
    for hardware, runs in rows.groups.items():
        achieved = fit(runs, source=f"{len(runs)} runs of {hardware}")
        made.append(
            Replay(hardware, achieved, runs, [predicted(run, achieved) for run in runs], _held_out(runs))
        )
    return made


def _held_out(runs: Sequence[Measured]) -> float | None:
    if len(runs) < _HALVES:
        return None
    errors = []
    for half in (0, 1):
        achieved = fit(runs[half::2])
        errors += [abs(predicted(run, achieved) / run.seconds - 1) for run in runs[1 - half :: 2]]
    return sum(errors) / len(errors)
