"""The face calls of one Run, as its loop and its methods announce them.

A step only notes its number; nothing else of what is here runs in it. Calls between steps are compared among all ranks
before they do anything, by a group of their own.
"""

from __future__ import annotations

from types import TracebackType

import torch

from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange
from shoal.train.calls.watch import Watch, watch_of
from shoal.world.progress_page import ProgressPage
from shoal.world.world import World


class Calls:
    """Announces what this Run does. Alone, and where workers meet at servers only, it does nothing.

    >>> calls = Calls()
    >>> with calls.together("run.evaluate"):
    ...     calls.step(1)
    """

    def __init__(
        self, watch: Watch | None = None, interval: int = 1, page: ProgressPage | None = None
    ) -> None:
        """`page`: where a launcher reads which call this rank is in."""
        self._watch = watch
        self.page = page or ProgressPage()
        self._begun = [0] if watch is None else watch.begun
        self._interval = interval
        self._run = 0
        self.inside = 0
        """How many calls that every rank makes are under way: what one of them calls belongs to it."""
        self.ended = False
        """Whether the loop has come to its end, where all workers are at one step again."""
        if watch is not None:
            self._run = len(watch.intervals)
            watch.begun.append(0)
            watch.intervals.append(interval)

    @staticmethod
    def of(world: World, exchange: Exchange, page: ProgressPage) -> Calls:
        """For a Run of these workers. Collective."""
        watch = None if exchange.uses_servers else watch_of(world)
        return Calls(watch, 1 if watch is None else exchange.sync_interval, page)

    @property
    def begun(self) -> int:
        """The step that was begun last, counted from 1."""
        return self._begun[self._run]

    def step(self, number: int) -> None:
        """Step `number`, counted from 1, begins, or is over with all before it."""
        self._begun[self._run] = number
        self.page.step(number)

    def compare(self, what: str) -> None:
        """Wait until all ranks make this call; raises `CallMismatch` on all of them if they make different ones."""
        if self._watch is None:
            return
        step = self._begun[self._run]
        if step % self._interval and not self.ended:
            raise ConfigError(
                f"{what} after step {step}: with a quorum workers are at the same step only after every "
                f"{self._interval}; call it after a multiple of {self._interval}, or after the loop."
            )
        self._watch.compare(self._run, what)

    def together(self, what: str) -> Together:
        """For `with`: a call that every rank makes."""
        return Together(self, what)

    def close(self) -> None:
        """The script has ended: whoever still waits for this rank shall know."""
        if self._watch is not None:
            self._watch.close()

    def explain(self, error: BaseException) -> None:
        """Raise `CallMismatch` instead, if that is why the others are gone."""
        if self._watch is not None:
            self._watch.explain(error)


class Together:
    """A call that every rank makes: compared when it begins, and explained where the others have left.

    Inference mode of the script does not reach into it: what the call makes on its way, training uses again.
    """

    def __init__(self, calls: Calls, what: str) -> None:
        self._calls = calls
        self._what = what
        self._before = calls.page.phase
        self._mode = torch.inference_mode(mode=False)

    def __enter__(self) -> None:
        self._calls.page.calls(self._what)
        try:
            self._calls.compare(self._what)
        except Exception as error:
            self._calls.explain(error)
            raise
        self._calls.inside += 1
        self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self._calls.inside -= 1
        if error is None:
            self._calls.page.enter(self._before)
        else:
            self._calls.explain(error)
