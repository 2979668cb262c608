"""One calibration for each kind of card: the fractions of its peaks with which measured runs come out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.plan.paper.achieved import Achieved
from shoal.plan.paper.cluster import Cluster
from shoal.plan.paper.gpt import Gpt
from shoal.plan.paper.layout import Layout
from shoal.plan.paper.step_time import paper_time


@dataclass(frozen=True)
class Measured:
    """One run that somebody has measured."""

    gpt: Gpt
    layout: Layout
    cluster: Cluster
    seconds: float
    name: str = ""


START = Achieved(0.6, 0.45, 40.0, 0.6, 0.6, 0.0003, 0.1, 1.3)
"""Where the search begins. What no run depends on stays there, and what few do stays near."""

_FITTED = tuple(f.name for f in dataclasses.fields(Achieved) if f.name not in ("error", "source"))
_BOUNDS = {
    "matrix": (0.05, 1.0),
    "attention": (0.02, 1.0),
    "stream": (2.0, 400.0),
    "inside": (0.05, 1.0),
    "between": (0.02, 1.0),
    "launch": (1e-6, 0.02),
    "fixed": (1e-3, 5.0),
    "odd_heads": (1.0, 6.0),
}
_HOLD = 0.02
"""How strongly a fraction that few runs show stays where it was: a weight on its logarithm, beside errors of runs."""

_LARGE = 0.05
"""A relative error that counts as large."""


def fit(runs: Sequence[Measured], start: Achieved = START, source: str = "") -> Achieved:
    """The fractions that make the relative errors of these runs least, in the mean of their squares.

    Fractions that no run depends on keep the values of `start`.
    """
    low = np.log([_BOUNDS[name][0] for name in _FITTED])
    high = np.log([_BOUNDS[name][1] for name in _FITTED])
    begin = np.clip(np.log([getattr(start, name) for name in _FITTED]), low, high)

    def misses(at: np.ndarray) -> np.ndarray:
        made = _made(at, start)
        errors = [_bounded(math.log(predicted(run, made) / run.seconds)) for run in runs]
        held = _HOLD * (at - begin)
        return np.array([*errors, *held])

    at = _least_squares(misses, begin, low, high)
    made = _made(at, start)
    return replace(made, error=mean_error(runs, made), source=source)


def predicted(run: Measured, achieved: Achieved) -> float:
    """Seconds of a run with these fractions."""
    return paper_time(run.gpt, run.layout, replace(run.cluster, achieved=achieved)).seconds


def mean_error(runs: Sequence[Measured], achieved: Achieved) -> float:
    """The mean of |predicted / measured - 1|."""
    return sum(abs(predicted(run, achieved) / run.seconds - 1) for run in runs) / len(runs)


def _bounded(error: float) -> float:
    """Its square grows like the error itself where that is large: one run that is like no other must not decide."""
    return math.copysign(_LARGE * math.sqrt(2 * (math.sqrt(1 + (error / _LARGE) ** 2) - 1)), error)


def _made(at: np.ndarray, start: Achieved) -> Achieved:
    made = dict(zip(_FITTED, np.exp(at).tolist(), strict=True))
    return Achieved(**made, error=start.error, source=start.source)


def _least_squares(
    misses: Callable[[np.ndarray], np.ndarray], begin: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Levenberg and Marquardt's method within bounds, on logarithms."""
    at, damping = begin.copy(), 1e-2
    here = misses(at)
    for _ in range(60):
        slopes = np.stack([(misses(at + step) - here) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1)
        while damping < 1e8:
            square = slopes.T @ slopes
            move = np.linalg.solve(
                square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(at))), slopes.T @ here
            )
            tried = np.clip(at - move, low, high)
            there = misses(tried)
            if there @ there < here @ here:
                break
            damping *= 4
        else:
            break
        gain = float(here @ here - there @ there)
        at, here, damping = tried, there, max(damping / 8, 1e-9)
        if gain < 1e-9:
            break
    return at
