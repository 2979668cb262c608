"""How wrong predictions were, by family of plans and machine; used the next time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.plan.cache import keep, recall

FILE = "residuals"
WEIGHT = 0.5
"""Of the newest measurement, beside those before."""
FAR = 0.15
"""How far off a prediction may be before it is said."""
LIMITS = (0.1, 10.0)
"""Beyond them something else was measured than was predicted, and nothing is learned."""


def residuals_of(machine: str) -> dict[str, float]:
    """By family, how many times longer steps took than was predicted without this."""
    found: dict[str, float] = {}
    for family, value in recall(FILE, machine).get("families", {}).items():
        ratio = _ratio(value)
        if ratio is not None:
            found[str(family)] = ratio
    return found


def learn(machine: str, family: str, measured: float, predicted: float) -> float | None:
    """Note a step that took `measured` seconds where `predicted` were; the new residual, if it was believed.

    `predicted` is with the residual of before, which it is learned on top of.
    """
    known = residuals_of(machine)
    before = known.get(family, 1.0)
    seen = _ratio(before * measured / predicted) if predicted > 0 else None
    if seen is None:
        return None
    after = (
        seen if family not in known else math.exp((1 - WEIGHT) * math.log(before) + WEIGHT * math.log(seen))
    )
    entry: Mapping[str, object] = {"families": {**known, family: after}}
    keep(FILE, machine, entry)
    return after


def _ratio(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value) if LIMITS[0] <= value <= LIMITS[1] else None
