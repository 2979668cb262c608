"""A run beside what was predicted of it: in its log from the start, compared at step 20, learned from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.plan.cache import machine_key, recall
from shoal.plan.predict import family_of
from shoal.plan.residuals import FAR, learn
from shoal.plan.show import span
from shoal.train.planning.answer_plan import PREDICTIONS
from shoal.types import Plan, StepReport

COMPARED_AT = 20
STEADY = 0.3
"""How far apart the quartiles of steps may be, as a share of their median, for anything to be learned."""
_FROM = 5
"""The first step that counts."""


@dataclass
class Foresight:
    """What was predicted of one run, and what it measures until it is compared."""

    plan: Plan
    seconds: float
    memory: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The memory by kind."""
    _seen: list[float] = field(default_factory=list)
    _done: bool = False

    @staticmethod
    def of(plan: Plan, model: str, workers: int, accumulate: int) -> Foresight | None:
        """What `shoal plan` or `auto` has predicted of this model on this machine; None if neither has."""
        plans: object = recall(PREDICTIONS, f"{machine_key()}-{model}-{workers}").get("plans")
        found: Any = plans.get(str(plan)) if isinstance(plans, dict) else None
        try:
            seconds, memory, cut = float(found[0]), int(found[1]), int(found[2])
            kinds = {str(kind)[:40]: int(nbytes) for kind, nbytes in dict(found[3]).items()}
        except (TypeError, ValueError, IndexError):
            return None
        return Foresight(plan, seconds, memory, kinds) if seconds > 0 and cut == accumulate else None

    def header(self) -> dict[str, float | int]:
        """For the first line of a log."""
        return {"predicted_seconds": self.seconds, "predicted_memory": self.memory}

    def after(self, report: StepReport) -> str:
        """A step is done. A sentence at the one at which it shows that the prediction was far off, else nothing."""
        if self._done:
            return ""
        if report.number >= _FROM:
            self._seen.append(report.seconds)
        if report.number < COMPARED_AT or len(self._seen) < COMPARED_AT // 2:
            return ""
        self._done = True
        low, measured, high = statistics.quantiles(self._seen, n=4)
        steady = high - low <= STEADY * measured
        if steady:
            learn(machine_key(), family_of(self.plan), measured, self.seconds)
        off = measured / self.seconds - 1
        if abs(off) <= FAR:
            return ""
        return f"steps take {span(measured)} and {span(self.seconds)} were predicted ({off:+.0%}); " + (
            "that is learned, and auto(replan=true) or `shoal plan` would plan with it"
            if steady
            else "they vary too much to learn from it, as on a machine with other work"
        )
