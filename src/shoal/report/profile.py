"""torch's profiler for a few steps: every operator and kernel of every rank, as a trace that Perfetto opens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

_STEPS = re.compile(r"\s*steps\s*=\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")


def profile_steps(text: str) -> tuple[int, int] | None:
    """The first and the last step of `profile=`; None where it is empty.

    >>> profile_steps("steps=10:13"), profile_steps("")
    ((10, 13), None)
    """
    if not text:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise ConfigError(f'profile={text!r}: give the first and the last step, as "steps=10:13".')
    return int(match[1]), int(match[2])


@dataclass
class StepProfile:
    """Profiles the steps from `first` to `last` of one rank, and writes them into the run's folder."""

    first: int
    last: int
    path: Path
    _running: Any = field(default=None, repr=False)

    def before(self, step: int) -> None:
        """Step `step` begins."""
        if self._running is None and self.first <= step <= self.last:
            from torch import profiler

            self._running = profiler.profile(record_shapes=True)
            self._running.start()

    def after(self, step: int) -> str:
        """Step `step` is over; what there is to say of it."""
        return self.close() if step >= self.last else ""

    def close(self) -> str:
        """Write what was profiled, also where the run has ended before the last of the steps."""
        running = self._running
        self._running = None
        if running is None:
            return ""
        running.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            return f"the profile could not be written to {self.path} ({error})"
        return f"profiled steps {self.first} to {self.last} into {self.path}; ui.perfetto.dev opens it"
