"""Steps of Shoal without the loop around them, which would report and save."""

from __future__ import annotations

from collections.abc import Callable

from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.types import StepReport

MANY = 10**6
"""More steps than anybody makes: so that a ledger is asked once how far to go, as in a run."""


class Steps:
    """Steps of one context, one after the other."""

    def __init__(self, context: StepContext, stop: int = MANY) -> None:
        self._context = context
        self._stop = stop
        self.done = 0
        """How many are done, by whomever."""

    def next(self) -> StepReport | None:
        """Train one step on; None when there is no more for this worker."""
        view = self._context.exchange.work.next(self.done, self._stop)
        if view is None:
            return None
        report = run_step(self._context, view)
        self.done = max(self.done, report.number)
        return report


def make_stepper(context: StepContext) -> Callable[[], None]:
    """Trains one step each time it is called."""
    steps = Steps(context)

    def step() -> None:
        assert steps.next() is not None

    return step
