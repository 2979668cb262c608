"""Steps, one after the other: learning rate, checkpoints, reports. The user's loop pulls them out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader
from shoal.errors import ConfigError
from shoal.report.console import Console
from shoal.report.events import EventLog
from shoal.report.servers import describe_servers
from shoal.train.checkpoints import Checkpoints
from shoal.train.parts import Parts
from shoal.train.progress import Progress
from shoal.train.schedule import MakeScheduler, advance, catch_up, make_scheduler, restore_schedule
from shoal.train.step import run_step
from shoal.types import StepReport

SERVERS_SECONDS = 10.0


@dataclass(frozen=True)
class Loop:
    """What the loop does around steps."""

    parts: Parts
    schedule: str | MakeScheduler | None
    checkpoints: Checkpoints
    log: Path | None
    header: Mapping[str, str | int | float]
    progress_bar: bool

    def steps(self, how_long: int | str, progress: Progress) -> Iterator[StepReport]:
        """Train until `how_long` is reached, yielding a report after each step; goes on from `progress`."""
        try:
            yield from self._steps(Goal.of(how_long, self.parts.loader), progress)
            self.checkpoints.finish()
        except GeneratorExit:  # the user has had enough
            self.checkpoints.wait()
            raise
        except BaseException:
            self.checkpoints.abandon()
            raise

    def _steps(self, goal: Goal, progress: Progress) -> Iterator[StepReport]:
        parts, total = self.parts, goal.steps
        progress.schedule = progress.schedule_now()
        scheduler = progress.scheduler = make_scheduler(self.schedule, parts.exchange.optimizer, total)
        if scheduler is not None and progress.schedule is not None:
            restore_schedule(scheduler, progress.schedule)
        first = parts.world.rank == 0
        title = str(self.header["strategy"])
        console = Console(total, title) if first and self.progress_bar else None
        events = EventLog.open(self.log / "events.jsonl", self.header) if first and self.log else None
        noted = monotonic()
        try:
            done = goal.reached(progress.step)
            while not done:
                number = progress.step if total is None else parts.exchange.claim(progress.step, total)
                if number is None:
                    break
                catch_up(scheduler, number - progress.step)  # steps that others have done meanwhile
                report = run_step(parts, number)
                # Where each part is a step of its own, others may still be at this one: it is not over yet.
                ahead = number >= progress.step
                progress.step = max(progress.step, report.number)
                done = goal.reached(progress.step) and not parts.exchange.apart
                if scheduler is not None and ahead and (not report.skipped or parts.exchange.counts_own):
                    advance(scheduler, report.loss)
                    catch_up(scheduler, report.number - number - 1)
                change = parts.balancing.after(report)
                if console is not None:
                    console.update(report)
                    if change is not None:
                        console.note(str(change))
                if events is not None:
                    events.write(report)
                    if change is not None:
                        events.note("shares", change.facts())
                    noted = self._note_servers(events, noted)
                last = done or report.number == total
                if self.checkpoints.due(report.number, last) and parts.exchange.saves:
                    at = replace(progress, step=report.number)
                    self.checkpoints.begin(f"step-{report.number}", at)
                yield report
            if total is None:
                parts.exchange.conclude()
            if events is not None:
                self._note_servers(events, 0.0)
            if console is not None and (facts := parts.exchange.servers()):
                console.note(describe_servers(facts))
        finally:
            parts.balancing.close()
            if console is not None:
                console.close()
            if events is not None:
                events.close()

    def _note_servers(self, events: EventLog, noted: float) -> float:
        """Every few seconds, write down how the servers are doing; when that was last done."""
        now = monotonic()
        if now - noted < SERVERS_SECONDS:
            return noted
        facts = self.parts.exchange.servers()
        if facts:
            events.note("servers", facts)
        return now


@dataclass(frozen=True)
class Goal:
    """How long to train, counted from the run's beginning."""

    loader: Loader | StreamLoader
    steps: int | None
    """None where only the end of a stream tells."""
    epochs: float = 0.0

    @staticmethod
    def of(text: int | str, loader: Loader | StreamLoader) -> Goal:
        """A number of steps, or of epochs.

        >>> from shoal.data.feed import Feed
        >>> loader = Loader(Feed(data=list(range(100)), global_batch=2, rank=0, size=1))
        >>> Goal.of("2ep", loader).steps, Goal.of(7, loader).steps
        (100, 7)
        """
        if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
            return Goal(loader, text)
        match = re.fullmatch(r"(?:(\d+)|(\d+(?:\.\d+)?)ep)", str(text))
        if match is None:
            raise ConfigError(f"steps({text!r}): give a number of steps, as 100, or of epochs, as '2ep'.")
        if match[1]:
            return Goal(loader, int(match[1]))
        return Goal(loader, loader.steps_until(float(match[2])), float(match[2]))

    def reached(self, step: int) -> bool:
        """Whether so many steps are enough."""
        return step >= self.steps if self.steps is not None else self.loader.ended(step, self.epochs)
