"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.train.calls.answers import Answers
from shoal.train.technique.early_stop import Best, EarlyStop
from shoal.train.technique.schedule import Schedule


@dataclass
class Progress:
    """What a checkpoint holds beside tensors, and only the loop changes."""

    step: int = 0
    schedule: Mapping[str, object] | None = None
    """Where the learning rate stood when the scheduler below took over."""
    scheduler: Schedule | None = None
    early_stop: EarlyStop | None = None
    early_stop_was: Mapping[str, object] | None = None
    """Where early stopping stood in the checkpoint that the run goes on from."""
    answers: Answers = field(default_factory=Answers)
    """What calls between loops have answered."""
    best: Best | None = None
    """By which the checkpoint `best` was saved."""

    def schedule_now(self) -> Mapping[str, object] | None:
        """Where the learning rate stands."""
        return self.schedule if self.scheduler is None else self.scheduler.state()
