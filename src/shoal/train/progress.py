"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shoal.train.schedule import schedule_state


@dataclass
class Progress:
    """What a checkpoint holds beside tensors, and only the loop changes."""

    step: int = 0
    schedule: Mapping[str, Any] | None = None
    """Where the learning rate stood when the scheduler below took over."""
    scheduler: LRScheduler | None = None

    def schedule_now(self) -> Mapping[str, Any] | None:
        """Where the learning rate stands."""
        return self.schedule if self.scheduler is None else schedule_state(self.scheduler)
