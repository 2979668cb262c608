"""How long a worker may hang where nobody has said it: less, the less is lost if it was only slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.stalls import HANG_SECONDS
from shoal.errors import Loss

FIRST_SECONDS = 10.0
TIMES = 4.0
"""Each hang may be a slow step that was taken for one: the next is waited for so many times as long."""
HANGS = ("a hang", "SIGSTOP")


@dataclass
class Patience:
    """Short while there are snapshots in memory, from which a run goes on at once.

    >>> patience = Patience(None, kept=lambda: True)
    >>> hang = Loss("worker 1 hangs", 1, "a hang")
    >>> patience.limit(0.5), patience.limit(20.0), patience.knows(hang), patience.after(hang), patience.limit(0.5)
    (10.0, 20.0, False, None, 40.0)
    >>> Patience(60.0, kept=lambda: True).limit(90.0)
    60.0
    """

    given: float | None
    """What `--hang-limit` says; None: nothing."""
    kept: Callable[[], bool]
    """Whether a snapshot is there."""
    hangs: int = 0

    def limit(self, usual: float) -> float:
        """After so many seconds a worker that hangs is taken for lost; 0: it never is. `usual`: these may pass."""
        if self.given is not None:
            return self.given
        return min(HANG_SECONDS, max(usual, self._least)) if self.kept() else HANG_SECONDS

    @property
    def _least(self) -> float:
        return FIRST_SECONDS * TIMES**self.hangs

    def after(self, loss: Loss | None) -> None:
        """A worker was lost."""
        if loss is not None and loss.cause in HANGS:
            self.hangs += 1

    def knows(self, loss: Loss | None) -> bool:
        """Whether what was lost is no worker that may only have been slow."""
        hung = loss is not None and loss.cause in HANGS
        return not hung or self.given is not None or not self.kept() or self._least >= HANG_SECONDS


def holds_snapshot(memory: str) -> bool:
    """Whether a job has a complete snapshot in its folder in memory."""
    return bool(memory) and any(Path(memory).glob("run-*/step-*/manifest.json"))
