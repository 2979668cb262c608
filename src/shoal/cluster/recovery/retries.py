"""Whether the workers are started again after one was lost: how often, how soon, and when another start is in vain.

Only starts in vain count: once the run gets further than it ever was, all is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster.recovery.elastic import Size
from shoal.cluster.report import LOST_PEER
from shoal.errors import Loss, WorkerFailed

RETRIES = 3
"""The default of `--retries`: so many starts in a row without progress."""
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before the next start, by how many were in vain."""


@dataclass(frozen=True)
class Verdict:
    """What follows from a loss."""

    again: bool
    pause: float = 0.0
    """Seconds to wait before the next start."""
    shrinks: bool = False
    """Whether there are fewer workers then."""
    why: str = ""
    """Why there is none, where that needs saying; a sentence."""


_NO = Verdict(again=False)


class Retries:
    """Remembers what was lost in one job, and decides.

    >>> retries = Retries(1)
    >>> killed = WorkerFailed("…", 137, loss=Loss("worker 1 was killed", 1, "SIGKILL", "step 7, loading data", 7))
    >>> retries.after(killed, reached=7).again
    True
    >>> retries.after(killed, reached=7).why
    'It was lost there twice, by SIGKILL.'
    """

    def __init__(self, most: int) -> None:
        """`most`: starts in a row that may be in vain; 0: nothing is ever started again."""
        self._most = most
        self._last: Loss | None = None
        self._furthest = 0
        """The step that any start has begun."""
        self.in_vain = 0
        self._shrunk = False
        """Whether a place was given up since the last loss: then its samples were another worker's."""
        self.times = 0
        """How often the workers were started again."""

    def after(
        self, failed: WorkerFailed, reached: int, size: Size | None = None, known: bool = True
    ) -> Verdict:
        """Decide. `reached`: the last step that the lost workers had begun; `size`: may become smaller.

        `known`: whether it was lost, and not only slow.
        """
        loss, before = failed.loss, self._last
        further = reached > self._furthest
        self._furthest = max(reached, self._furthest)
        if self._most == 0 or loss is None or not (loss.begun or self._furthest):
            return _NO
        if loss.rank < 0 or loss.cause == LOST_PEER:  # what has happened is known elsewhere
            self.times += 1
            return Verdict(again=True)
        self._last = loss
        if size is not None and size.shrink(loss, before):
            self.times += 1
            self.in_vain = 0
            self._shrunk = True
            return Verdict(again=True, shrinks=True)
        if known and before is not None and loss.step and _alike(before, loss, self._shrunk):
            samples = f" Its samples in that step: {loss.samples}." if loss.samples else ""
            return Verdict(again=False, why=f"It was lost there twice, by {loss.cause}.{samples}")
        self._shrunk = False
        self.in_vain = 0 if further else self.in_vain + 1
        if self.in_vain > self._most:
            starts = "one start" if self._most == 1 else f"{self._most} starts"
            return Verdict(
                again=False,
                why=f"After {starts} without progress it is not started again (--retries {self._most}).",
            )
        self.times += 1
        return Verdict(again=True, pause=_PAUSES[min(self.in_vain, len(_PAUSES) - 1)])


def _alike(one: Loss, other: Loss, shrunk: bool) -> bool:
    return (one.cause, one.place) == (other.cause, other.place) and (shrunk or one.rank == other.rank)
